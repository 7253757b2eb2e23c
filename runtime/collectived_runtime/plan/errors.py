"""What can be wrong with a set of plans.

PlanFault
├── Stuck        somebody would wait for ever, or for another span
├── Overwritten  something is read that has been, or is being, written over; or that was never there
├── Misordered   the left operand of a fold is not the one with the lowest contribution
├── Miscounted   a contribution is missing, or there twice, or a result is missing
└── Divergent    the same span is folded by different trees
"""


class PlanFault(Exception):
    """The plans of a collective do not do what they should."""


class Stuck(PlanFault):
    """Somebody would wait for ever, or gets another span than it expects."""


class Overwritten(PlanFault):
    """A move reads what is written over, or writes over what is still needed."""


class Misordered(PlanFault):
    """A fold has its operands the wrong way round."""


class Miscounted(PlanFault):
    """A final value lacks a contribution, has it twice, or does not arrive."""


class Divergent(PlanFault):
    """Two participants fold the same span by different trees."""
