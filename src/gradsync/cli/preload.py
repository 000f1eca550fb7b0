"""What the fork server imports before it forks ranks; nobody else may, for it marks the process.

The server is the ranks' parent. It would live as long as any of them, so it has to die with the
launcher for them to do so.
"""

import gradsync.cli.worker as worker
from gradsync.comm.parent import end_with_parent

__all__ = ["worker"]

end_with_parent()
