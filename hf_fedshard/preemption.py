"""
What the groups do when the run is to end before its time: all of them at the next border, or each by itself.

Inside a round groups stand at different steps and may not talk, but for keys in the rendezvous store. They use three:

- `request`: when the first process was told to end. Written once.
- `arrived/<round>`: how many groups have come to the last step of a round.
- `decision/<round>`: `border` or `alone`, written once, by an atomic compare-and-set. The last group to arrive writes
  `border`; a group that cannot come in time writes `alone`.

Why nobody is left waiting: a group enters the averaging only after it has read `border`, which stands there only when all
groups have arrived, each with one step to go. A group leaves alone only after it has read `alone`. The key holds one of
them for ever, so all groups read the same one, and all ranks of a group do. The waiting itself is done with the store
and not in a collective, so that a rank that waits sees its signal and can give up.

Inside a group the ranks are told by a small all-reduce of the group at the end of each step: rank by rank they might see
a key one step apart, and one of them would leave while the others wait in the next step.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

import torch
import torch.distributed as dist


logger = logging.getLogger(__name__)

PREEMPTED_EXIT_CODE = 143
"""What a process reports that was ended by SIGTERM: 128 + 15."""

_POLL_SECONDS = 0.2
# For the last ranks to save, when the time is over and the kill has not come yet.
_LEAST_WAIT_SECONDS = 10.0
_BORDER, _ALONE = b"border", b"alone"


class TrainingPreempted(SystemExit):
    """
    Leaves `trainer.train()` when the run was told to end, after everything was saved. Uncaught it ends the process with the
    exit code 143, so that the lines after `train()`, which save and evaluate a finished model, do not run.

    Args:
        checkpoint (`str`):
            The checkpoint to resume from.
        global_step (`int`):
            Step at which this rank has stopped.
    """

    def __init__(self, checkpoint: str, global_step: int) -> None:
        super().__init__(PREEMPTED_EXIT_CODE)
        self.checkpoint = checkpoint
        self.global_step = global_step


class Preemption:
    """
    The groups' agreement about how to end, seen from this rank.

    Args:
        store (`Store`):
            The rendezvous store, under a prefix that belongs to this training alone.
        group (`ProcessGroup`):
            The ranks of this rank's group.
        num_groups (`int`):
            G.
        device (`torch.device`):
            Where collectives of the group run.
        received (`Callable`):
            When this process was told to end, in seconds since the epoch, or `None`.
        grace_seconds (`float`):
            Time between the request and the kill.
        timeout_seconds (`float`):
            How long to wait for the other groups at a border.
    """

    def __init__(
        self,
        store: dist.Store,
        group: dist.ProcessGroup,
        num_groups: int,
        device: torch.device,
        received: Callable[[], float | None],
        grace_seconds: float,
        timeout_seconds: float,
    ) -> None:
        self.store = store
        self.group = group
        self.num_groups = num_groups
        self.device = device
        self.received = received
        self.grace_seconds = grace_seconds
        self.timeout_seconds = timeout_seconds
        self.save_seconds = 0.0
        """How long the last checkpoint took, to be kept up to date: so much is kept of the grace, at least half of it."""
        self._leads = group.rank() == 0
        self._deadline: float | None = None
        self._polled = -_POLL_SECONDS
        self._arrived: int | None = None

    def requested(self) -> bool:
        """
        Whether this rank knows of a request. Without communication but for the store, which the first rank of the group
        asks a few times a second at most.
        """
        if self._deadline is not None:
            return True
        stamp = self.received()
        now = time.monotonic()
        if stamp is not None:
            # With an answer, unlike `set`: it stands there before this rank tells its group, and the first one stays.
            self.store.compare_set("request", "", repr(stamp))
        elif not self._leads or now - self._polled < _POLL_SECONDS:
            return False
        self._polled = now
        if not self.store.check(["request"]):
            return False
        self._learn()
        return True

    def requested_in_group(self) -> bool:
        """
        Whether any rank of the group knows of a request. Collective over the group: one all-reduce, which all of its ranks
        make at the end of each step.
        """
        flag = torch.tensor(float(self.requested()), device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.group)
        if not flag.item():
            return False
        if self._deadline is None:
            self._learn()  # never waits: the rank that knew has the key in the store
        return True

    def after_step(self, round: int, steps_left: int, seconds_left: float) -> bool:
        """
        To be called at the end of each step that ends no round. Collective over the group.

        Args:
            round (`int`):
                Number of the round, the same in all groups.
            steps_left (`int`):
                Steps to its end, at least 1.
            seconds_left (`float`):
                How long they and the averaging will take.

        Returns:
            `bool`: Whether the group has to save by itself and leave. The same on all of its ranks.
        """
        requested = self.requested_in_group()
        if steps_left == 1:
            return not self.wait_for_border(round, seconds_left)
        if not requested:
            return False
        # The first rank decides for its group: the clocks of the others may say otherwise.
        alone = torch.zeros((), device=self.device)
        if self._leads:
            alone.fill_(self._decide(round, give_up=self._too_late(seconds_left)) == _ALONE)
        dist.broadcast(alone, group_src=0, group=self.group)
        return bool(alone.item())

    def wait_for_border(self, round: int, seconds_left: float) -> bool:
        """
        Announces this group and waits until all groups can enter the averaging. Not a collective, and the answer is the same
        on all ranks of all groups; to be called by all ranks.

        Args:
            round (`int`):
                Number of the round.
            seconds_left (`float`):
                How long it takes from here to the end of the averaging.

        Returns:
            `bool`: Whether the border will come. If not, the group has to save by itself.
        """
        if self._leads and self._arrived != round:
            self._arrived = round
            arrived = self.store.add(f"arrived/{round}", 1)
            if arrived == self.num_groups and not (self.requested() and self._too_late(seconds_left)):
                self.store.compare_set(f"decision/{round}", "", _BORDER.decode())
        started = time.monotonic()
        while True:
            give_up = self.requested() and self._too_late(seconds_left)
            decision = self._decide(round, give_up)
            if decision is not None:
                break
            waited = time.monotonic() - started
            if waited > self.timeout_seconds:
                raise RuntimeError(
                    f"The other federation groups did not come to the end of round {round + 1} in "
                    f"{self.timeout_seconds:g} seconds (timeout_seconds, else ddp_timeout)."
                )
            # A tenth of what was waited: short where the groups are even, easy on the store where one is slow.
            time.sleep(min(max(waited / 10, 0.001), _POLL_SECONDS))
        if decision == _BORDER and self._leads and round > 0:
            # All groups are in this round, so every rank has read what was decided about the last one.
            for name in ("decision", "arrived"):
                self.store.delete_key(f"{name}/{round - 1}")
        return decision == _BORDER

    def leave(self, num_ranks: int) -> None:
        """
        Waits, when this rank has saved, until all ranks have, or until the time is over, and some seconds in any case: whoever
        goes takes the others with it, which may be about to finish. Launchers end all processes as soon as one has gone, and
        the store may live in one of them.

        Args:
            num_ranks (`int`):
                Ranks of the world.
        """
        now = time.monotonic()
        deadline = max(self._deadline or now + self.grace_seconds, now + _LEAST_WAIT_SECONDS)
        # The process that serves the store may be gone before the others have read the last number.
        with contextlib.suppress(RuntimeError):
            self.store.add("left", 1)
            while self.store.add("left", 0) < num_ranks and time.monotonic() < deadline:
                time.sleep(0.02)

    def _learn(self) -> None:
        """Reads the request. A clock that is wrong by hours makes the grace shorter, never longer than from here on."""
        elapsed = max(0.0, time.time() - float(self.store.get("request")))
        self._deadline = time.monotonic() + self.grace_seconds - elapsed
        if self._leads:
            logger.warning("The run was told to end %.1f s ago: it saves and leaves.", elapsed)

    def _too_late(self, seconds: float) -> bool:
        """Whether something that ends in so many seconds leaves too little of the grace for saving."""
        assert self._deadline is not None
        reserve = max(self.grace_seconds / 2, 1.5 * self.save_seconds)
        return time.monotonic() + seconds > self._deadline - reserve

    def _decide(self, round: int, give_up: bool) -> bytes | None:
        """What stands in the store about a round; to give up is an offer, which comes too late if all have arrived."""
        key = f"decision/{round}"
        if give_up:
            return bytes(self.store.compare_set(key, "", _ALONE.decode()))
        return bytes(self.store.get(key)) if self.store.check([key]) else None
