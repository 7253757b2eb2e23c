"""Large values that the only rank of a worker lends: its own carrier sends them to the other workers' ranks.

A rank asks for a carrier with the submission of a large value. It gets one once the links to the other workers are
known to be plain TCP. From then on it submits such values without copying them. Which worker's rank has a carrier makes
no difference to the others (`run/lent_task.py`).
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial

from collectived_proto.ipc import carrier_orders, messages
from collectived_runtime.engine.clients.doorbells import Doorbells
from collectived_runtime.engine.clients.rank_carrier import RankCarrier, connect_carrier
from collectived_runtime.engine.compile.program import CompiledCollective
from collectived_runtime.engine.loop.execution import Execution, ResultDelivery
from collectived_runtime.engine.loop.phases import Phases
from collectived_runtime.engine.run import lent_task
from collectived_runtime.engine.run.links import Links, PeerNetwork
from collectived_runtime.engine.run.task import TaskTools
from collectived_runtime.engine.submit.tracker import Instance, InstanceTracker


class Lending:
    """Of one generation. In the group loop's thread."""

    def __init__(
        self,
        network: PeerNetwork,
        doorbells: Doorbells,
        links: Links,
        phases: Phases,
        tracker: InstanceTracker,
        tools: TaskTools,
    ) -> None:
        self._network = network
        self._doorbells = doorbells
        self._links = links
        self._phases = phases
        self._tracker = tracker
        self._tools = tools
        self._places = len(network.topology.peers)
        self._can_lend = network.topology.may_lend_links
        self._carrier: RankCarrier | None = None

    def check(self, submission: messages.Submit) -> None:
        """Raise MalformedMessage where arrays are lent to a carrier that there is not."""
        if submission.lending == messages.SUBMIT_LENT and self._carrier is None:
            raise messages.MalformedMessage("a submission of arrays that are lent, without a carrier")

    def carry_out(
        self, instance: Instance, program: CompiledCollective
    ) -> Generator[Execution, None, ResultDelivery | None]:
        """Carry an instance out whose value is lent.

        Returns:
            None: it is still to be carried out, from the value as this worker reads it.
        """
        rank = self._network.topology.own_ranks[0]
        inputs = instance.arrivals[rank].inputs
        if inputs.may_lend and self._carrier is None and self._can_lend and self._has_plain_links(program):
            self._offer(rank)
        carrier = self._carrier
        if not inputs.is_lent or carrier is None:
            return None
        note = partial(self._note, rank)
        if not (lent_task.can_carry(program) and self._has_plain_links(program)):
            yield self._phases.prepare(instance, lent_task.stage(carrier, instance.number, self._tools, note))
            instance.arrivals[rank].is_lent = False
            return None
        delivery = ResultDelivery()
        sources = [instance.arrivals[rank].inputs for rank in program.contributors]
        run = partial(lent_task.run, carrier=carrier, instance=instance.number, places=self._places, on_answering=note)
        yield self._phases.execute(instance, program, sources, delivery, run=run)
        instance.arrivals[rank].is_lent = False
        return delivery

    def _has_plain_links(self, program: CompiledCollective) -> bool:
        """Whether all links of a program are there that can be lent; those that are not are asked for."""
        task = program.tasks[0]
        found = self._links.get(task.peers, task.channel)
        return found is not None and task.peers <= self._links.lend(task.channel).keys()

    def _offer(self, rank: int) -> None:
        """Give a rank a carrier, if there are descriptors for it."""
        local_rank = self._doorbells.local_ranks[rank]
        message = carrier_orders.encode_carrier(self._network.generation)
        self._carrier = connect_carrier(
            self._network.poller,
            lambda theirs: self._doorbells.lend(local_rank, message, theirs.fileno()),
            lambda why: self._doorbells.drop(local_rank, why),
        )
        self._can_lend = self._carrier is not None

    def _note(self, rank: int, is_answering: bool) -> None:
        """A rank that is stopped is missing in the instance that it carries."""
        self._tracker.progress[rank].is_stuck = not is_answering

    def close(self) -> None:
        if self._carrier is not None:
            self._carrier.close()
