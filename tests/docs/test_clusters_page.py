"""What the page on clusters tells to run as it stands, and that no launcher is needed for."""

import os
import re
import shlex
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from listening import free_port

_PAGE = Path(__file__).parents[2] / "docs" / "clusters.md"


def test_the_store_of_a_host_that_stays_is_there_for_those_who_come() -> None:
    (line,) = re.findall(r"`(python -c .*TCPStore.*)`", _PAGE.read_text(encoding="utf-8"))
    port = free_port()
    _, *arguments = shlex.split(line.replace("29400", str(port)))
    with subprocess.Popen([sys.executable, *arguments], env=os.environ | {"OMP_NUM_THREADS": "1"}) as host:
        try:
            store: Any = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), wait_for_workers=False)
            store.set("met", "here")
            assert store.get("met") == b"here"
        finally:
            host.kill()
