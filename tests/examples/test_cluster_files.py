"""The files for clusters in examples/ have the form that their readers expect, and name commands that exist."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from gradsync.cli.main import COMMANDS
from gradsync.cli.options import add_config_options, given_options, new_parser

_EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_pytorch_job_starts_gradsync_on_every_replica() -> None:
    job = yaml.safe_load((_EXAMPLES / "kubernetes.yaml").read_text(encoding="utf-8"))
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert set(replicas) == {"Master", "Worker"} and replicas["Master"]["replicas"] == 1
    for replica in replicas.values():
        (container,) = replica["template"]["spec"]["containers"]
        assert container["name"] == "pytorch" and container["command"] == ["gradsync", "train"]
        arguments = [each for each in container["args"] if each != "--auto-resume"]
        parser = new_parser("train", "")
        add_config_options(parser)
        assert given_options(parser, arguments)["preset"] == "gpt2"


def test_the_batch_file_is_a_script_that_uses_srun() -> None:
    path = _EXAMPLES / "slurm.sbatch"
    text = path.read_text(encoding="utf-8")
    assert text.startswith("#!/bin/bash\n")
    commands = re.findall(r"^srun gradsync (\w+)", text, re.MULTILINE)
    assert commands == ["doctor", "train"] and set(commands) <= set(COMMANDS)


@pytest.mark.parametrize(("code", "is_requeued"), [(0, False), (1, False), (143, True)])
def test_the_batch_file_goes_back_into_the_queue_when_the_run_was_ended_by_the_signal(
    tmp_path: Path, code: int, is_requeued: bool
) -> None:
    """With programs that stand for Slurm's."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash to run the script")
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "activate").touch()
    for name, ending in {"srun": f'[ "$2" != train ] || exit {code}', "scontrol": ""}.items():
        (tools / name).write_text(f'#!{bash}\necho "{name} $*"\n{ending}\n')
        (tools / name).chmod(0o755)
    place = {"VENV": tmp_path, "SCRATCH": tmp_path, "SLURM_CPUS_PER_TASK": 8, "SLURM_JOB_ID": 7}
    environment = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    environment |= {name: str(value) for name, value in place.items()}
    script = [bash, str(_EXAMPLES / "slurm.sbatch")]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=30, check=False)
    told = [line.split()[:3] for line in done.stdout.splitlines()]
    assert (done.returncode, done.stderr) == (code, "")
    assert told[:2] == [["srun", "gradsync", "doctor"], ["srun", "gradsync", "train"]]
    assert told[2:] == ([["scontrol", "requeue", "7"]] if is_requeued else [])
