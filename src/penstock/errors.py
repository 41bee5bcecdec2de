"""Every exception that Penstock raises on purpose, each with the exit code of the command line."""

from typing import ClassVar

TRAINING_PACKAGES = ("torch", "safetensors", "tensorboard")
"""Packages that the extra ``train`` installs; planning needs none of them."""


SHORTEST_CUT = 40
"""A word is cut to no fewer characters."""


def shortened(text: str, longest: int) -> str:
    """A text of at most ``longest`` characters, of which a third are the end of a longer one.

    If its longest word is long enough, only that is cut.
    """
    if len(text) <= longest:
        return text
    word = max(text.split(" "), key=len)
    room = longest - (len(text) - len(word))
    if room > SHORTEST_CUT and word != text:
        return text.replace(word, shortened(word, room), 1)
    end = longest // 3
    return f"{text[: longest - end - 5]} ... {text[-end:]}"


class PenstockError(Exception):
    """Anything that Penstock refuses or reports; ``str()`` is one line fit for a user."""

    exit_code: ClassVar[int] = 4


class BadInput(PenstockError):
    """Input of the user that cannot be used; the message names thing, value, limit and remedy.

    A message is one line. One that repeats a long value is shortened in the middle.
    """

    exit_code = 2
    longest: ClassVar[int] = 600

    def __init__(self, message: str) -> None:
        super().__init__(shortened(" ".join(message.split()), self.longest))


class CaptureFailed(BadInput):
    """The model cannot be captured; the message names the line of user code and the way out."""

    longest = 2000


class WeightElsewhere(BadInput):
    """The loop needs values of a weight that another rank has; nothing was changed.

    The message names the weight, the ranks and `Pipeline.full_model`.
    """


class Infeasible(PenstockError):
    """No plan satisfies the limits; the message says what would."""

    exit_code = 3


class PluginFailed(PenstockError):
    """A planner or schedule from outside raised, or returned what is no plan or schedule."""


class RunFailed(PenstockError):
    """A run started and could not go on; the message names rank, action and cause."""


class LossNotFinite(RunFailed):
    """The loss became NaN or infinite; no optimizer step was taken with it.

    ``step`` is the step of the batch. ``at`` puts the place where it appeared before ``remedy``.
    """

    def __init__(self, problem: str, remedy: str = "", step: int = 0) -> None:
        super().__init__(f"{problem}; {remedy}" if remedy else problem)
        self.problem, self.remedy, self.step = problem, remedy, step

    def at(self, place: str) -> "LossNotFinite":
        """The same error with a place."""
        return LossNotFinite(f"{self.problem}; {place}", self.remedy, self.step)


class PeerFailed(RunFailed):
    """Another rank has failed or ended; that rank's message explains more."""


class ReplicasDiffer(RunFailed):
    """Copies of a weight on several ranks are not equal; the message says which rank differs."""


class WorkerLost(RunFailed):
    """A worker was killed; the message says which and by what."""


class SaidByAnotherRank(PenstockError):
    """A rank ends with an exit code and prints nothing: another rank has reported the error."""

    def __init__(self, code: int) -> None:
        super().__init__("another rank has said what is wrong")
        self.code = code


class Stalled(RunFailed):
    """A wait exceeded its bound; the message says which rank waited for which action of whom."""


INTERRUPTED = 130
"""The exit code after Ctrl-C."""

SIGNALLED = 128
"""Exit codes above this one say which signal has ended a process."""


def exit_code_of(failure: BaseException) -> int:
    """The exit code with which a process ends after ``failure``."""
    match failure:
        case SaidByAnotherRank():
            return failure.code
        case PenstockError():
            return failure.exit_code
        case SystemExit(code=int(code)):
            return code
        case KeyboardInterrupt():
            return INTERRUPTED
        case _:
            return RunFailed.exit_code


def missing_for_training(error: BaseException) -> str:
    """The remedy for an import that failed because Penstock only plans here; empty for others."""
    name = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
    if not name or name.partition(".")[0] not in TRAINING_PACKAGES:
        return ""
    return f"this needs '{name}', which only planning does without; install penstock[train]"
