# SPDX-License-Identifier: Apache-2.0
"""A process beside a guest that sees to its end: `keeper.py FOLDER PROGRAM ARGUMENT...`, with a pipe as its input.

It starts the program. When the pipe is closed, because the owner said so or was killed, program and folder go.
When the program ends by itself, so does this process's output, and the folder stays until the owner has read it.
"""

import ctypes
import os
import select
import shutil
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(folder: str, command: list[str]) -> None:
    me = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() == me:
                nowhere = os.open(os.devnull, os.O_RDWR)
                os.dup2(nowhere, 0)
                os.execv(command[0], command)
        except OSError as error:
            print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        finally:
            os._exit(127)
    ended = os.pidfd_open(pid)
    ready, _, _ = select.select([0, ended], [], [])
    os.close(1)
    if ended not in ready:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while os.read(0, 4096):
        pass
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    # An interrupt at the terminal is for the owner, who closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    main(sys.argv[1], sys.argv[2:])
