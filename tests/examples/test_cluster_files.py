"""The files for clusters in examples/ have the form that their readers expect, and name commands that exist."""

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
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash to read the script")
    subprocess.run([bash, "-n", str(path)], check=True, timeout=30)
