"""The tables of programs in whose logs each line can be understood by itself, read by `rules`.

    slurm      slurmctld: a job waits until it is allocated, is configured; slurmd: it begins on its node
    containerd its CRI log: 1.6 logs begin and end only, 1.7 and later size and duration too
    crio       CRI-O's pulls, which have an id
    docker     dockerd's pulls (their begin at level debug only), and what `docker pull` prints
    pyxis      enroot and pyxis: import, unpacking, squashfs
    kubeflow   conditions of jobs in YAML, JSON and `kubectl describe`: training operator, Trainer v2, JobSet
    ray        runtime_env
    uv         its phases
    conda      conda, micromamba
    megatron   Megatron's timers, and the times that it prints
    transformers   Hugging Face: weights and checkpoint shards, the Trainer's begin
    steps      the first lines about training steps, after each start by torchrun: Megatron, DeepSpeed, MaxText,
               torchtitan

Patterns are bounded: a hostile line may contain their literal ten thousand times. Secrets that a program prints (Ray's
environment) are used to pair its lines and never shown. Another clue costs the search nearly nothing, but a line that
contains one costs as much as a thousand others: clues should be as strict as possible without losing a line.
"""

from __future__ import annotations

from functools import cache

from bootseer.report.foreign.kubernetes import KubernetesParser
from bootseer.report.foreign.nccl import NcclParser
from bootseer.report.foreign.parser import Parser
from bootseer.report.foreign.pip import PipParser
from bootseer.report.foreign.rules import AGAIN, AT, BEGIN, END, FAIL, MARK, NOW, STEP, TOOK, Rule, TableParser
from bootseer.report.foreign.times import DURATION
from bootseer.report.foreign.torchelastic import LINE, TorchElasticParser
from bootseer.report.search import Clue, Search

_PULL = "image_loading.pull"
_UNPACK = "image_loading.unpack"
_INSTALL = "environment_setup.install"
_RUNTIME_ENV = "environment_setup.runtime_env"
_READ = "model_initialization.checkpoint_read"

_JOB = r"(?P<job>(?P<key>\d{1,12})(?:_\d{1,12})?)"
_TASK = r"(?P<job>\d{1,12}(?:_\d{1,12})?)"
"""Of a job array, each task is configured by itself, while all are submitted as one job."""
_HOSTS = r"(?P<host>[a-zA-Z][\w.,\[\]-]{0,4095})"
_ON = rf"{_JOB}\S{{0,99}} in \S+ on {_HOSTS}"
_ALLOCATED = rf"{_JOB}\S{{0,99}} NodeList={_HOSTS}"

_IMAGE = r"(?P<image>[^\s\"\\]{1,512})"
# A begin names the image as the pod does, its end sometimes in full, with the default registry.
_CRI = r"\\*\"(?P<image>(?:docker\.io/(?:library/)?)?(?P<key>[^\s\"\\]{1,512}))\\*\""
_SIZE_AND_TIME = rf"(?:[^\n]{{0,2000}}?, size \\*\"(?P<bytes>\d{{1,15}})\\*\" in (?P<took>{DURATION}))?"
_DOTS = r"(?: ?\.\.\.|: \S)"
_CRIO = rf"{_IMAGE}(?:\\*\")? {{1,8}}id=(?P<key>[0-9a-f-]{{36}})"

_CONDITION = r"\s*\"(?P<at>[^\"]+)\",[^{}\n]{0,600}?\"reason\":\s*\""
_LINE_END = r"\"?,?\s*$"
_TRAINING_JOBS = ("PyTorchJob", "TFJob", "MPIJob", "XGBoostJob", "PaddleJob", "JAXJob")

_GAP = r"(?: |\\u001b\[[0-9;]*m)+"
# Within JSON, colours are escaped.
_UV = rf"{_GAP}(?P<packages>\d{{1,7}}) packages?{_GAP}in (?P<took>{DURATION})"
_UV_PHASES = ("Resolved", "Prepared", "Uninstalled", "Installed", "Checked", "Audited")

_TIMER = r"\.+: \(?(?:(?P<fastest_ms>\d+\.\d+), )?(?P<ms>\d+\.\d+)"
_PRINTED = r"\] datetime: (?P<at>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)"
_MODEL_BUILT = "[after model, optimizer, and learning rate scheduler are built"
_BAR = r": 100%\|[^|\n]*\| \d+/\d+ \[(?P<clock>(?:\d{1,3}:)?\d\d:\d\d)<"

PROGRAMS: dict[str, tuple[Rule, ...]] = {
    "slurm": (
        Rule(BEGIN, "queue", "_slurm_rpc_submit_batch_job: JobId=", _JOB),
        Rule(BEGIN, "queue", "_slurm_rpc_allocate_resources", rf":? JobId={_JOB}\S{{0,99}} NodeList="),
        Rule(END, "queue", "Allocate JobId=", _ALLOCATED),
        Rule(END, "queue", "_slurm_rpc_allocate_resources", rf":? JobId={_ALLOCATED}"),
        Rule(END, "queue", "Started JobId=", _ON),
        Rule(BEGIN, "allocation", "Allocate JobId=", _ALLOCATED.replace(_JOB, _TASK), seldom_ended=True),
        Rule(BEGIN, "allocation", "Started JobId=", _ON.replace(_JOB, _TASK), seldom_ended=True),
        Rule(END, "allocation", "Configuration for JobId=", rf"{_TASK}\S{{0,99}} is complete"),
        Rule(MARK, "bound", "Launching batch ", rf"(?:job |JobId=){_JOB} for UID \d"),
        Rule(MARK, "bound", "StepId=", rf"(?<=launch task StepId=){_JOB}\.\S+ request from UID:?\s?\d"),
    ),
    "containerd": (
        # Of a pull that containerd's end interrupted, the log has no end.
        Rule(BEGIN, _PULL, "PullImage ", rf"{_CRI}(?:\\*\"|\s*$)", restarts=True),
        Rule(END, _PULL, "PullImage ", rf"{_CRI} returns image reference"),
        Rule(FAIL, _PULL, "PullImage ", rf"{_CRI} failed"),
        Rule(END, _PULL, "Pulled image ", rf"{_CRI} with image id{_SIZE_AND_TIME}", says="pulled"),
    ),
    "crio": (
        Rule(BEGIN, _PULL, "Pulling image: ", _CRIO),
        Rule(END, _PULL, "Pulled image: ", _CRIO, says="pulled"),
    ),
    "docker": (
        Rule(BEGIN, _PULL, "/images/create?fromImage=", r"(?P<image>[^\s&\"\\]{1,512})", seldom_ended=True),
        Rule(END, _PULL, '"image pulled', rf"\\*\"[^\n]{{0,300}}? remote=\\*\"{_IMAGE}\\*\"", says="pulled"),
        Rule(BEGIN, _PULL, "Pulling from ", r"(?<=: Pulling from )(?P<image>[\w.:/-]{1,512})", seldom_ended=True),
        Rule(END, _PULL, "Status: Downloaded newer image for ", _IMAGE, says="pulled"),
        Rule(END, _PULL, "Status: Image is up to date for ", _IMAGE, says="was already on the machine"),
    ),
    "pyxis": (
        Rule(BEGIN, _PULL, "pyxis: importing docker image", rf"(?:: {_IMAGE}| \.\.\.)"),
        Rule(END, _PULL, "pyxis: imported docker image: ", _IMAGE, says="imported"),
        Rule(
            FAIL, _PULL, "pyxis: failed to import docker image", r"(?: with importer\b|\s*$)", says="the import failed"
        ),
        # Older versions do not say that the import is over.
        Rule(END, _PULL, "pyxis: creating container filesystem", _DOTS),
        Rule(BEGIN, _UNPACK, "pyxis: creating container filesystem", _DOTS, seldom_ended=True),
        Rule(END, _UNPACK, "pyxis: starting container", _DOTS, says="the container's files were unpacked"),
        Rule(FAIL, _UNPACK, "pyxis: failed to create container filesystem", r"\s*$", says="unpacking failed"),
        Rule(BEGIN, _PULL, "[INFO] Querying registry for permission grant", r"\s*$"),
        Rule(BEGIN, _PULL, "[INFO] Fetching image", r"\s*$", seldom_ended=True),
        Rule(END, _PULL, "[INFO] Extracting image ", r"(?:layers|content)", says="layers were fetched"),
        Rule(BEGIN, _UNPACK, "[INFO] Extracting image ", r"(?:layers|content)"),
        Rule(END, _UNPACK, "[INFO] Creating squashfs filesystem", r"\.\.\.", says="layers were unpacked"),
        Rule(BEGIN, "image_loading.squash", "[INFO] Creating squashfs filesystem", r"\.\.\."),
        Rule(END, "image_loading.squash", "Exportable Squashfs 4.0 filesystem", ",", says="the squashfs was written"),
    ),
    "kubeflow": (
        Rule(NOW, "", "TransitionTime", r"\"?: \"?(?P<at>\d{4}-[^\s\",]+)\"?,?\s*$"),
        Rule(NOW, "", "Last Transition Time:", r" +(?P<at>\d{4}-\S+)"),
        Rule(BEGIN, "queue", "Timestamp", r"(?<=creationTimestamp)\"?: ?\"?(?P<at>\d{4}-[^\s\",]+)", seldom_ended=True),
        Rule(BEGIN, "queue", "Creation Timestamp:", r" +(?P<at>\d{4}-\S+)", seldom_ended=True),
        Rule(
            END,
            "queue",
            "Resume",
            r"(?:(?<=eason: Resume)|(?<=eason\": \"Resume)|(?<=   Resume))(?:d|Jobs)\b",
            says="the job was admitted",
        ),
        Rule(END, "queue", 'TransitionTime":', _CONDITION + r"(?:Resumed|ResumeJobs)\""),
        *(Rule(BEGIN, "queue", f"{job}Created", _LINE_END) for job in _TRAINING_JOBS),
        *(Rule(END, "queue", f"{job}Running", _LINE_END, says="the job's pods ran") for job in _TRAINING_JOBS),
        Rule(BEGIN, "queue", 'TransitionTime":', _CONDITION + r"\w+JobCreated\""),
        Rule(END, "queue", 'TransitionTime":', _CONDITION + r"\w+JobRunning\""),
    ),
    "ray": (
        Rule(
            BEGIN, _RUNTIME_ENV, "Creating runtime env: ", r"\{(?P<key>.*?)(?: with timeout \d+ seconds)?\.?(?<!\s)\s*$"
        ),
        Rule(
            END, _RUNTIME_ENV, "Successfully created runtime env: ", r"\{(?P<key>.*?), (?:the )?context: ", says="made"
        ),
        Rule(FAIL, _RUNTIME_ENV, "Runtime env creation failed for ", r"\d+ times", says="runtime_env failed"),
        Rule(FAIL, _RUNTIME_ENV, "_env creation failed ", r"\d+ times", says="runtime_env failed"),
    ),
    "uv": tuple(
        Rule(TOOK, _INSTALL, phase, _UV, says=f"uv {phase.lower()} packages: {{packages}}") for phase in _UV_PHASES
    ),
    "conda": (
        Rule(BEGIN, _INSTALL, "Collecting package metadata (", r"[\w.]+\)", seldom_ended=True),
        Rule(BEGIN, _INSTALL, "Solving environment: ", r"(?:done|\.\.\.|[-|/]|\\)", seldom_ended=True),
        Rule(END, _INSTALL, "Executing transaction: ", r"[^\n]{0,80}?done", says="conda installed packages"),
        Rule(BEGIN, _INSTALL, "Transaction starting", r"\s*$", seldom_ended=True),
        Rule(END, _INSTALL, "Transaction finished", r"\s*$", says="micromamba installed packages"),
    ),
    "megatron": (
        Rule(
            TOOK,
            "model_initialization.megatron_init",
            "(seconds): ",
            r"(?<=time to initialize megatron \(seconds\): )(?P<s>\d+\.\d+)",
            says="Megatron initialized itself",
            label="initialized",
        ),
        Rule(
            TOOK,
            _READ,
            "-checkpoint ",
            "(?<=load-checkpoint )" + _TIMER,
            says="the checkpoint was loaded (slowest rank)",
            label="model",
        ),
        Rule(
            TOOK,
            "model_initialization.model_setup",
            "-and-optimizer-setup ",
            "(?<=model-and-optimizer-setup )" + _TIMER,
            says="model and optimizer were set up (slowest rank)",
            label="model",
        ),
        Rule(
            TOOK,
            "model_initialization.data_setup",
            "/test-data-iterators-setup ",
            _TIMER,
            says="data iterators were set up (slowest rank)",
            label="data",
        ),
        Rule(AT, "", "[after megatron is initialized", _PRINTED, label="initialized"),
        Rule(AT, "", _MODEL_BUILT, _PRINTED, label="model"),
        Rule(AT, "", "[after dataloaders are built", _PRINTED, label="data"),
        Rule(MARK, "training_loop", "[before the start of training step", _PRINTED),
    ),
    "transformers": (
        Rule(TOOK, _READ, "Loading checkpoint shards", _BAR, says="checkpoint shards were loaded (whole seconds)"),
        Rule(TOOK, _READ, "Loading weights", _BAR, says="weights were loaded (whole seconds)"),
        Rule(MARK, "training_loop", "***** Running training *****", r"\s*$"),
    ),
    # Literals that begin like those of other programs: another first letter would slow the search down by a tenth.
    "steps": (
        Rule(
            STEP,
            "training_began",
            "d samples: ",
            r"(?<=consumed samples: ) {0,12}(?P<step>\d{1,15}) \| elapsed time per iteration \(ms\): (?P<ms>\d+\.\d)",
        ),
        Rule(STEP, "training_began", "[Rank 0] step=", r"(?P<step>[1-9]\d{0,11}), skipped=\d"),
        Rule(STEP, "training_began", "d step: ", r"(?<=completed step: )(?P<step>\d{1,12}), seconds: \d"),
        Rule(STEP, "training_began", "p: ", r"(?<=step: ) {0,12}(?P<step>\d{1,12}) .{0,40}loss: "),
        Rule(AGAIN, "", "distributed/", LINE + r" (?:\[[^\]\n]{1,99}\] Starting worker group|failed \(exitcode: )"),
    ),
}


def parsers() -> list[Parser]:
    return [
        TorchElasticParser(),
        NcclParser(),
        KubernetesParser(),
        PipParser(),
        *(TableParser(name, rules) for name, rules in PROGRAMS.items()),
    ]


@cache
def search(done: frozenset[int] = frozenset()) -> tuple[Search, list[list[int]]]:
    """The search for the clues of all parsers but those done (places in `parsers`); and for each of its numbers
    the places of the parsers that want such lines."""
    behind: dict[bytes, list[bytes]] = {}
    wanting: dict[bytes, list[int]] = {}
    for index, parser in enumerate(parsers()):
        for literal, then in parser.clues if index not in done else ():
            behind.setdefault(literal, []).append(then)
            wanting.setdefault(literal, []).append(index)
    clues = [Clue(literal, b"(?:" + b"|".join(dict.fromkeys(then)) + b")") for literal, then in behind.items()]
    # Where one literal begins with another one, a place is reported once, for either.
    return Search(clues), [
        sorted({i for b, indices in wanting.items() if a.startswith(b) or b.startswith(a) for i in indices})
        for a in wanting
    ]
