"""Every error raised on purpose, with the exit code that a script sees. Rendering is left to `cli/render.py`."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What `hetrun` returns to the shell; the same numbers stand in `--json` output."""

    DONE = 0
    JOB_FAILED = 1
    USAGE = 2
    PREFLIGHT = 3
    UNREACHABLE = 4
    LOST_CONTACT = 5
    HANG = 6
    NO_PROGRESS = 7
    NOT_CLEAN = 8
    INTERNAL = 9
    SOME_UNREACHABLE = 10
    INTERRUPTED = 130
    READER_GONE = 141  # what a shell shows of a program that SIGPIPE ended
    TERMINATED = 143


class HetrunError(Exception):
    """Something a user can cause or mend: what happened, to whom, and the next thing to do."""

    exit_code: ExitCode = ExitCode.JOB_FAILED

    def __init__(self, message: str, *, hint: str | None = None, host: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.host = host

    def __str__(self) -> str:
        return f"{self.host}: {self.message}" if self.host else self.message


class ConfigError(HetrunError):
    """An inventory, recipe or saved file does not say what it must; names the file and the key."""

    exit_code = ExitCode.USAGE


class NoPlanError(HetrunError):
    """No split fits the devices; names the group, the shortfall and a knob."""

    exit_code = ExitCode.USAGE


class PreflightError(HetrunError):
    """A host cannot run the job as it is (interpreter, torch, disk, address)."""

    exit_code = ExitCode.PREFLIGHT


class HostError(HetrunError):
    """A host cannot be reached, or refused the key, or showed a wrong host key."""

    exit_code = ExitCode.UNREACHABLE
    check = "reach"  # of preflight
    away: tuple[str, ...] = ()  # hosts that did not answer, where it is about several


class AuthError(HostError):
    """A host, or one on the way, does not let our key in."""

    check = "auth"


class HostKeyError(HostError):
    """A host, or one on the way, shows a key that is not the known one."""

    check = "hostkey"


class LostContactError(HetrunError):
    """A host was there when the run began and stopped answering."""

    exit_code = ExitCode.LOST_CONTACT


class JobError(HetrunError):
    """A rank failed; the message names the earliest one."""

    exit_code = ExitCode.JOB_FAILED


class HangError(HetrunError):
    """No progress within the stated time."""

    exit_code = ExitCode.HANG


class StoppedError(HetrunError):
    """The user pressed Ctrl-C; the message says what was stopped."""

    exit_code = ExitCode.INTERRUPTED


class StorageError(HetrunError):
    """A file of ours cannot be written or read back (full disk, no permission)."""

    exit_code = ExitCode.JOB_FAILED
