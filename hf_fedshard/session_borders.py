"""The borders of a Trainer's run: what is averaged, asked for, met and logged where a round ends."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import Trainer, TrainerControl, TrainerState

from .early_end import TO_END, EarlyEnd
from .held_requests import FLAGS, HeldRequests
from .mesh import FederationMesh
from .metrics import exchange_rows
from .rounds import Rounds
from .scheduled_requests import ScheduledRequests
from .session_reports import RoundReports


class SessionBorders:
    """
    Makes the borders of one training run, and knows whether it is at one.

    Args:
        trainer (`Trainer`):
            The Trainer.
        mesh ([`FederationMesh`]):
            The federation.
        rounds ([`Rounds`]):
            What averages.
        requests ([`HeldRequests`]):
            What callbacks have asked for in the round.
        scheduled ([`ScheduledRequests`]):
            What Trainer's own schedule asks for.
        reports ([`RoundReports`]):
            The round's losses and tokens, and what is logged of them.
        early_end ([`EarlyEnd`]):
            Ends the run at a border, if it was told to.
    """

    def __init__(
        self,
        trainer: Trainer,
        mesh: FederationMesh,
        rounds: Rounds,
        requests: HeldRequests,
        scheduled: ScheduledRequests,
        reports: RoundReports,
        early_end: EarlyEnd,
    ) -> None:
        self.trainer = trainer
        self.mesh = mesh
        self.rounds = rounds
        self.requests = requests
        self.scheduled = scheduled
        self.reports = reports
        self.early_end = early_end
        self.in_round = False
        """Whether a round is running."""
        self.at_border = False
        """Between the end of a round and the next step. Unlike `not in_round`, not before the first step."""

    def is_needed(self, state: TrainerState) -> bool:
        """
        Whether the round that is over ends with one model. With `overlap_steps` only where somebody needs it; the same on all
        ranks, since schedules are, and requests of other callbacks have come with the last averaging.

        Args:
            state (`TrainerState`):
                Trainer's, at the end of a step.
        """
        return self.rounds.needs_border or self.scheduled.pending or self.scheduled.is_over(state)

    def close(self, state: TrainerState, control: TrainerControl) -> None:
        """
        The border: averages, takes the union of all ranks' requests, and hands the metrics to Trainer's log. Collective over
        the world.

        Args:
            state (`TrainerState`):
                Trainer's.
            control (`TrainerControl`):
                Trainer's, in which the requests are met.
        """
        reports = self.reports
        reports.end_losses(self.rounds)
        votes = self.requests.votes() | self.early_end.requests()
        border = self.rounds.close(votes, {"tokens_seen": reports.take_tokens(state)})
        for each in (*border.earlier, border):
            reports.note_tokens(each, state)
        self.scheduled.pending = False
        self.in_round = False
        self.at_border = True
        self.requests.meet(control, border.votes)
        self.early_end.end_if_asked(control, border.votes.get(TO_END, False))
        for earlier in border.earlier:
            reports.note_round(earlier)
        # Where the first step of a round was begun and not counted, the border belongs to no round, and there is nothing to log.
        if border.metrics.steps and border.metrics not in [earlier.metrics for earlier in border.earlier]:
            # One line a round: Trainer's own where it is due, else one for the metrics.
            follows = control.should_log and state.global_step > self.trainer._globalstep_last_logged
            reports.note_round(border, logs_follow=follows)

    def advance(self, state: TrainerState) -> None:
        """
        With `overlap_steps`, after a step that makes no border: takes in and starts what is due.

        Args:
            state (`TrainerState`):
                Trainer's.
        """
        rounds, sums = self.rounds, {}
        if rounds.is_due:
            self.reports.end_losses(rounds)
            self.reports.begin_losses()
            sums = {"tokens_seen": self.reports.take_tokens(state)}
        votes = self.requests.votes()
        border = rounds.advance(votes, sums)
        if border is not None:
            self.reports.note_tokens(border, state)
            self.reports.note_round(border)

    def meet_requests(self, control: TrainerControl) -> None:
        """
        At a border, what was asked for with the event is met at once. Collective over the world.

        Args:
            control (`TrainerControl`):
                Trainer's.
        """
        self.scheduled.pending = False
        self.share(control, FLAGS)

    def share(self, control: TrainerControl, flags: Sequence[str]) -> None:
        """
        At a border: what any rank asks for holds for all. Collective over the world.

        Args:
            control (`TrainerControl`):
                Trainer's.
            flags (`Sequence[str]`):
                Those of its flags that are shared.
        """
        asked = {flag: bool(getattr(control, flag)) for flag in flags} | self.early_end.requests()
        rows, _ = exchange_rows({name: float(value) for name, value in asked.items()}, self.mesh)
        for flag in flags:
            setattr(control, flag, any(rows[flag]))
        self.early_end.end_if_asked(control, any(rows.get(TO_END, ())))
