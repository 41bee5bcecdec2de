"""The dependencies between actions. No other file defines them."""

from penstock.schedule.action import Action
from penstock.schedule.shape import PipelineShape


def predecessors(action: Action, shape: PipelineShape) -> tuple[Action, ...]:
    """The actions that must end before ``action`` starts, on whichever device they run.

        F(s, m)   after F(s-1, m)
        R(s, m)   after F(s, m)
        B(s, m)   after F(s, m), R(s, m), and B(s+1, m) or I(s+1, m);   I(s, m) likewise
        W(s, m)   after I(s, m)

    Only those that the schedule contains count: a backward is either B, or I and W, and R is left
    out where the forward has only just ended. Tensors that skip stages add no dependency, because
    the chain of stages already orders their sender before their receiver.

    >>> shape = PipelineShape(stages=3, micro_batches=1)
    >>> [str(before) for before in predecessors(Action("B", 1, 0), shape)]
    ['1F0', '2B0', '2I0']
    """
    stage, m = action.stage, action.micro_batch
    match action.kind:
        case "F":
            return (Action("F", stage - 1, m),) if stage > 0 else ()
        case "R":
            return (Action("F", stage, m),)
        case "W":
            return (Action("I", stage, m),)
        case "B" | "I":
            own = [Action("F", stage, m)]
            if shape.recomputes(stage):
                own.append(Action("R", stage, m))
            if stage + 1 < shape.stages:
                own += [Action("B", stage + 1, m), Action("I", stage + 1, m)]
            return tuple(own)
