"""The records that a start keeps for the next start's warm parent."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from bootseer.hook.programs import KNOWN, RECORD, SCHEMA
from bootseer.launch.command import Options
from bootseer.launch.run import _start_warm
from bootseer.launch.session import Session
from bootseer.launch.warm import Known, Record, merge_records, shared

RECORDED = Record(
    launcher="torchrun", program="train.py", flags=("-u",), modules=("json", "torch"), native={}, changed=(),
    telling="a" * 64, main="/job/train.py",
)  # fmt: skip


def _refused(**facts: object) -> dict[str, object]:
    return {"program": "train.py", **facts}


def test_the_newest_record_of_a_launcher_is_kept_and_the_program_that_imports_most():
    known = merge_records(Known(), [RECORDED], [])
    newer = msgspec.structs.replace(RECORDED, modules=("torch",))
    other = msgspec.structs.replace(RECORDED, program="log.py", modules=("json",))
    assert merge_records(known, [newer], []).launchers["torchrun"].modules == ("torch",)
    assert merge_records(known, [other], []) == known


def test_a_module_that_did_more_than_define_is_left_out_from_then_on():
    known = merge_records(Known(), [RECORDED], [_refused(why_not="it opens files", module="json", unfit=True)])
    assert known.launchers["torchrun"].cold == {"json": "it opens files"}
    assert merge_records(known, [RECORDED], []).launchers["torchrun"].cold == {"json": "it opens files"}


def test_a_package_of_which_two_modules_are_left_out_is_left_out_as_a_whole_unless_it_is_a_framework():
    known = merge_records(
        Known(), [RECORDED], [_refused(why_not="x", module=name) for name in ("rich.style", "torch.a")]
    )
    known = merge_records(
        known, [], [_refused(why_not="y", module=name) for name in ("rich.theme", "torch.b", "yaml.c")]
    )
    assert list(known.launchers["torchrun"].cold) == ["rich.style", "torch.a", "rich", "torch.b", "yaml.c"]


def test_a_parent_that_cannot_be_copied_is_not_started_again_until_its_modules_change():
    known = merge_records(Known(), [RECORDED], [_refused(why_not="threads", module="", unfit=True)])
    assert known.launchers["torchrun"].never == "threads"
    assert merge_records(known, [RECORDED], []).launchers["torchrun"].never == "threads"
    newer = msgspec.structs.replace(RECORDED, modules=("torch",))
    assert merge_records(known, [newer], []).launchers["torchrun"].never == ""


def test_a_parent_that_does_not_answer_is_waited_for_at_most_twice():
    late = _refused(why_not="the warm parent did not answer within 120 s", late=True)
    known = merge_records(Known(), [RECORDED], [late])
    assert known.launchers["torchrun"].never == ""
    again = merge_records(known, [RECORDED], [late])
    assert again.launchers["torchrun"].never == late["why_not"]


def test_what_concerns_one_start_alone_is_not_learnt():
    known = merge_records(Known(), [RECORDED], [_refused(why_not="the variable X differs", module="", unfit=False)])
    assert known == merge_records(Known(), [RECORDED], [])


def test_other_nodes_see_no_value_that_might_be_a_path_or_a_secret() -> None:
    native = {"OMP_NUM_THREADS": "1", "OMP_TOOL_LIBRARIES": "/home/me/lib", "TZ": "x" * 33, "OMP_PLACES": "cores:4"}
    native |= {"LD_PRELOAD": "mine.so", "PYTHONPATH": ".", "NVIDIA_API_KEY": "h4nter", "HTTP_PROXY": "theirs:80"}
    known = merge_records(Known(), [msgspec.structs.replace(RECORDED, native=native, start_digest="5e4d")], [])
    assert shared(known).launchers["torchrun"].native == {"OMP_NUM_THREADS": "1", "OMP_PLACES": "cores:4"}
    assert shared(known).launchers["torchrun"].start_digest == ""  # of all variables: their values can be guessed


def test_links_and_pipes_in_the_spool_are_not_followed(run, env: dict[str, str], tmp_path: Path) -> None:
    """The user of a container may write there, and `bootseer run` may run as root."""
    env["BOOTSEER_CACHE"] = str(tmp_path / "cache")
    (tmp_path / "record").write_text(json.dumps({"schema": SCHEMA, **msgspec.to_builtins(RECORDED)}))
    (tmp_path / "mine").write_text("keep me")
    script = f"""cp record $BOOTSEER_WARM/{RECORD}a.json && mkfifo $BOOTSEER_WARM/{RECORD}b.json
        ln -s $PWD/record $BOOTSEER_WARM/{RECORD}c.json && ln -s $PWD/mine $BOOTSEER_WARM/{KNOWN}
        echo $BOOTSEER_WARM >where; mkdir other; mv $BOOTSEER_WARM aside; ln -s $PWD/other $BOOTSEER_WARM"""
    done = run("run", "--warm", "auto", "--job", "x", "--", "sh", "-c", script, timeout=60)
    assert done.returncode == 0
    assert done.stderr.count("what the program imported is not recorded") == 2
    assert (tmp_path / "mine").read_text() == "keep me"
    assert Path((tmp_path / "where").read_text().strip()).is_symlink()
    assert list((tmp_path / "other").iterdir()) == []
    assert "torchrun" in (tmp_path / "aside" / KNOWN).read_text()


@pytest.mark.parametrize("made", ["ln -s {secret} made", "mkdir made && mkfifo made/pages-1.img"])
def test_links_and_pipes_in_the_folder_for_process_snapshots_are_not_followed(
    run, env: dict[str, str], tmp_path: Path, made: str
) -> None:
    """A container's user may write there."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("secret")
    cache = tmp_path / "cache"
    env |= {"BOOTSEER_CACHE": str(cache), "LOGIN_TOKEN": "something"}
    script = f"cd {cache}/containers/process-* && {made.format(secret=tmp_path / 'secret')}"
    done = run("run", "-q", "--process-snapshot", "--", "sh", "-c", script, timeout=60)
    assert done.returncode == 0, done.stderr
    assert list(cache.glob("processes/*")) == []


def test_runs_of_a_node_that_end_together_do_not_disturb_each_other(run, env: dict[str, str], tmp_path: Path) -> None:
    """Another run has just replaced its record, or moved a program's record: the name no longer exists."""
    env["BOOTSEER_CACHE"] = str(tmp_path / "cache")
    (tmp_path / "cache/warm").mkdir(parents=True, mode=0o700)
    (tmp_path / "cache/warm/.a.json.1-2").symlink_to("replaced")
    (tmp_path / "record").write_text(json.dumps({"schema": SCHEMA, **msgspec.to_builtins(RECORDED)}))
    script = f"cp record $BOOTSEER_WARM/{RECORD}a.json"
    done = run("run", "-q", "--warm", "auto", "--job", "x", "--", "sh", "-c", script)
    assert (done.returncode, done.stderr) == (0, "")


def test_nodes_that_share_a_spool_have_records_of_their_own(run) -> None:
    words = ["run", "-q", "--warm", "auto", "--job", "x", "--attempt", "0", "--", "sh", "-c", "echo $BOOTSEER_WARM"]
    one, other = (run(*words, more={"BOOTSEER_NODE": node}).stdout.strip() for node in ("a", "b"))
    assert one != other
    assert Path(one).parent == Path(other).parent


def test_without_a_folder_for_records_a_start_is_not_warm(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("os.getuid", lambda: 64321)  # root's folder does not depend on a home
    options = Options(spool=str(tmp_path), warm="auto")
    session = Session(["true"], options, {})
    with ExitStack() as parts:
        _start_warm(["true"], options, session, {"HOME": "nowhere"}, parts)
        assert session.warm is None
    assert "not warm: user 64321 has no home folder" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--trace-to", "stderr", "--spool", "/dev/null/spool"], "not warm: there is no"),
        (["--no-hook"], "not warm: the hook"),
    ],
)
def test_a_start_that_cannot_be_recorded_is_reported(run, words: list[str], said: str) -> None:
    done = run("run", "-q", "--warm", "auto", *words, "--", "sh", "-c", "echo $BOOTSEER_WARM")
    assert (done.returncode, done.stdout) == (0, "\n")
    assert said in done.stderr


@pytest.mark.parametrize("text", ["{", json.dumps({"schema": SCHEMA, "launcher": 3}), "x" * ((1 << 20) + 1)])
def test_an_invalid_record_costs_only_a_message(run, env: dict[str, str], tmp_path: Path, text: str):
    env["BOOTSEER_CACHE"] = str(tmp_path / "cache")
    (tmp_path / "record").write_text(text)
    words = ["sh", "-c", f"cp record $BOOTSEER_WARM/{RECORD}x.json"]
    done = run("run", "--warm", "auto", "--job", "x", "--", *words)
    assert done.returncode == 0
    assert "what the program imported is not recorded" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "cache").rglob("*.json"))
