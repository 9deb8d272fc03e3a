// containerd's own tests of snapshotters, against `bootseer snapshotter` as a proxy plugin.
package suite

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	_ "github.com/containerd/containerd/pkg/testutil" // its option -test.root
	"github.com/containerd/containerd/snapshots"
	"github.com/containerd/containerd/snapshots/proxy"
	"github.com/containerd/containerd/snapshots/testsuite"
	"google.golang.org/grpc"
)

func start(ctx context.Context, root string) (snapshots.Snapshotter, func() error, error) {
	socket := filepath.Join(root, "s.sock")
	command := strings.Fields(os.Getenv("BOOTSEER_COMMAND"))
	command = append(command, "snapshotter", "--root", filepath.Join(root, "r"), "--socket", socket)
	process := exec.Command(command[0], command[1:]...)
	process.Stderr = os.Stderr
	if err := process.Start(); err != nil {
		return nil, nil, err
	}
	stop := func() error { process.Process.Signal(os.Interrupt); process.Wait(); return nil }
	for until := time.Now().Add(60 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		if _, err := os.Stat(socket); err == nil {
			break
		} else if time.Now().After(until) {
			stop()
			return nil, nil, fmt.Errorf("no socket: %w", err)
		}
	}
	link, err := grpc.Dial("unix://"+socket, grpc.WithInsecure())
	if err != nil {
		stop()
		return nil, nil, err
	}
	made := proxy.NewSnapshotter(snapshotsapi.NewSnapshotsClient(link), "bootseer")
	return made, func() error { link.Close(); return stop() }, nil
}

func TestSuite(t *testing.T) {
	testsuite.SnapshotterSuite(t, "bootseer", start)
}
