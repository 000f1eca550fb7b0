"""Who may write into a run folder: new runs into empty ones, resumed runs into their own."""

from dataclasses import asdict, replace

import pytest

from gradsync.errors import CheckpointError, ConfigError
from gradsync.train import folderlock, runfolder
from gradsync.train.config import TrainConfig, resolve
from gradsync.train.runfolder import RunFolder, check_usable, newest_run_path, read_config


def config_for(path, **options) -> TrainConfig:
    return resolve({"run": str(path), **options})


def refusal(config: TrainConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        check_usable(config)
    return str(caught.value)


def test_a_new_folder_is_made_with_the_options_in_it(tmp_path):
    config = config_for(tmp_path / "deep" / "run", steps=7)
    RunFolder(config.run).create(config)
    assert read_config(tmp_path / "deep" / "run") == asdict(config)


def test_a_new_run_does_not_go_into_a_used_folder(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert "is not empty; continue the run in it with --resume" in refusal(config_for(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_path_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    assert "is not a folder" in refusal(config_for(tmp_path / "file" / "deep" / "run"))
    assert "is a file" in refusal(config_for(tmp_path / "file"))


def test_there_must_be_something_to_resume(tmp_path):
    assert "nothing to resume" in refusal(config_for(tmp_path / "none", resume=True))


def test_a_run_of_another_configuration_is_refused_and_left_alone(tmp_path):
    config = config_for(tmp_path)
    RunFolder(tmp_path).create(config)
    changed = replace(config, resume=True, context=64, lr=0.5)
    message = refusal(changed)
    assert "--context 128 -> 64" in message
    assert "--lr 0.002 -> 0.5" in message
    with pytest.raises(ConfigError):
        RunFolder(tmp_path).create(changed)
    assert read_config(tmp_path) == asdict(config)


def test_a_resumed_run_may_use_other_hardware(tmp_path):
    config = config_for(tmp_path)
    RunFolder(tmp_path).create(config)
    check_usable(replace(config, resume=True, nproc=3, threads=1, checkpoint_every=5))


def test_a_folder_that_holds_no_run_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"is not a run folder: it holds no config\.yaml"):
        read_config(tmp_path)
    with pytest.raises(ConfigError, match="is not a run folder: there is no such folder"):
        read_config(tmp_path / "nowhere")
    (tmp_path / "config.yaml").write_text("[")
    with pytest.raises(CheckpointError, match="is damaged"):
        read_config(tmp_path)


def test_the_newest_run_is_the_one_whose_start_was_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="there is none"):
        newest_run_path()
    for name in ("a", "b"):
        config = config_for(f"runs/{name}")
        RunFolder(config.run).create(config)
    assert newest_run_path() == "runs/b"


def test_a_start_is_noted_on_a_line_of_its_own_after_one_that_was_cut_short(tmp_path):
    folder = RunFolder(tmp_path)
    folder.append_start({"step": 0})
    with (tmp_path / "starts.jsonl").open("a") as file:
        file.write('{"step": 1, "ho')
    folder.append_start({"step": 2})
    assert (tmp_path / "starts.jsonl").read_text() == '{"step": 0}\n{"step": 2}\n'


def test_the_options_are_not_written_through_a_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    run = tmp_path / "run"
    RunFolder(run).create(config_for(run))
    (run / "config.yaml.unfinished").symlink_to(victim)
    RunFolder(run).create(config_for(run, resume=True))
    assert victim.read_text() == "precious"


def test_two_processes_cannot_be_at_work_in_one_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(folderlock, "_PATIENCE_S", 0.1)
    config = config_for(tmp_path / "run")
    lock = RunFolder(config.run).create(config)
    with pytest.raises(ConfigError, match="another process is training in run folder"):
        RunFolder(config.run).create(replace(config, resume=True))
    lock.release()
    RunFolder(config.run).create(replace(config, resume=True)).release()


def test_who_comes_a_moment_later_finds_the_folder_used(tmp_path, monkeypatch):
    config = config_for(tmp_path / "run")

    def slow_lock(folder):
        (folder / "config.yaml").write_text("of another run")
        return folderlock.FolderLock(folder)

    monkeypatch.setattr(runfolder, "FolderLock", slow_lock)
    with pytest.raises(ConfigError, match="is not empty"):
        RunFolder(config.run).create(config)
