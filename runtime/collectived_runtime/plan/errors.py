"""Errors in a set of plans.

PlanError
├── PlanDeadlock       a participant would wait forever, or for another span
├── BufferOverwrite    something is read that has been, or is being, written over; or that was never there
├── FoldOrderError     the left operand of a fold is not the one with the lowest contribution
├── ContributionError  a contribution is missing, or there twice, or a result is missing
└── FoldDivergence     the same span is folded by different trees
"""


class PlanError(Exception):
    """The plans of a collective do not do what they should."""


class PlanDeadlock(PlanError):
    """A participant would wait forever, or gets another span than it expects."""


class BufferOverwrite(PlanError):
    """A move reads what is written over, or writes over what is still needed."""


class FoldOrderError(PlanError):
    """A fold has its operands the wrong way round."""


class ContributionError(PlanError):
    """A final value lacks a contribution, has it twice, or does not arrive."""


class FoldDivergence(PlanError):
    """Two participants fold the same span by different trees."""
