"""The borders of a Trainer's run: what is averaged, asked for, met and logged where a round ends."""

from __future__ import annotations

from collections.abc import Callable

from transformers import Trainer, TrainerControl, TrainerState
from transformers.trainer_utils import SaveStrategy

from .early_end import TO_END, EarlyEnd
from .held_requests import FLAGS, HeldRequests
from .mesh import FederationMesh
from .metrics import exchange_rows
from .rounds import Rounds
from .scheduled_requests import ScheduledRequests
from .session_reports import RoundReports


ACTIONS = ("should_log", "should_evaluate", "should_save")
"""What Trainer does at the end of a step or an epoch, in its order."""


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
        self.withheld: tuple[str, ...] = ()
        """While Trainer does one of its [`ACTIONS`]: the others, which wait for all ranks to hear of them."""

    def is_needed(self, state: TrainerState) -> bool:
        """
        Whether the round that is over ends with one model. With `overlap_steps` only where somebody needs it; the same on all
        ranks, since schedules are, and requests of other callbacks have come with the last averaging.

        Args:
            state (`TrainerState`):
                Trainer's, at the end of a step.
        """
        return self.rounds.needs_border or self.scheduled.pending or self.scheduled.is_over(state)

    def close(self, state: TrainerState, control: TrainerControl, log_follows: bool = True) -> None:
        """
        The border: averages, takes the union of all ranks' requests, and hands the metrics to Trainer's log. Collective over
        the world.

        Args:
            state (`TrainerState`):
                Trainer's.
            control (`TrainerControl`):
                Trainer's, in which the requests are met.
            log_follows (`bool`, defaults to `True`):
                Whether Trainer logs next, if a log was asked for.
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
        # Ahead of the requests: a line of the rounds clears `should_log`, and Trainer's own would be lost.
        for earlier in border.earlier:
            reports.note_round(earlier)
        # Where the first step of a round was begun and not counted, the border belongs to no round, and there is nothing to log.
        if border.metrics.steps and border.metrics not in [earlier.metrics for earlier in border.earlier]:
            # One line a round: Trainer's own where it is due, else one for the metrics. By the votes, which are the same on
            # all ranks: the lines before may have had a callback ask for a log on one.
            follows = border.votes["should_log"] and state.global_step > self.trainer._globalstep_last_logged
            reports.note_round(border, logs_follow=log_follows and follows)
        self.requests.meet(control, border.votes)
        self.early_end.end_if_asked(control, border.votes.get(TO_END, False))

    def close_on_demand(self, state: TrainerState, control: TrainerControl) -> None:
        """
        The border for a call of Trainer's methods inside a round. Collective over the world.

        Args:
            state (`TrainerState`):
                Trainer's.
            control (`TrainerControl`):
                Trainer's, in which the requests are met; a log waits until the call is over.

        Raises:
            TrainingPreempted: If the border will not come, since the run ends before its time.
        """
        self.requests.hold_back(control)
        self.early_end.wait_for_border()
        self.close(state, control, log_follows=False)
        # The call may log, which would clear the request for Trainer's own line.
        self.requests.hold_back(control, ("should_log",))

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

    def stay(self, control: TrainerControl) -> None:
        """
        Told at the end of a step or an epoch that the model is at a border already, the same on all ranks: what was asked for
        is met here. [`~SessionBorders.act`] comes next, and tells all ranks of it.

        Args:
            control (`TrainerControl`):
                Trainer's.
        """
        self.in_round = False
        self.at_border = True
        self.reports.forget_losses()
        self.requests.give_back(control)

    def act(self, act: Callable[[], None]) -> None:
        """
        Where all groups hold one model: has Trainer log, evaluate and save what is due, one after the other. What a callback
        asks for meanwhile holds for all ranks before the next of them, or one rank would evaluate or save by itself.
        Collective over the world.

        Args:
            act (`Callable[[], None]`):
                Trainer's part: does what the flags of its control say. Called once for each that is set.
        """
        trainer = self.trainer
        self.scheduled.pending = False
        # The log of the round may have come since the ranks have last told each other what they ask for.
        self._share()
        if not any(getattr(trainer.control, flag) for flag in ACTIONS):
            act()  # as at the end of every step: a subclass may do more in it
            return
        for flag in ACTIONS:
            # The same on all ranks, by the exchange before it.
            if not getattr(trainer.control, flag):
                continue
            self.withheld = tuple(other for other in ACTIONS if other != flag)
            self.hold_withheld(trainer.control)
            try:
                act()
            finally:
                self.withheld = ()
            if flag == "should_evaluate" and trainer.args.save_strategy == SaveStrategy.BEST:
                # Trainer has decided by the metric, and whatever else was asked for does not count.
                self.requests.drop("should_save")
            self.requests.give_back(trainer.control)
            self._share()

    def show_withheld(self, event: str, control: TrainerControl) -> None:
        """
        To be called ahead of each event: what waits is shown to the callbacks, which may withdraw it. It is done if any rank
        still asks for it.

        Args:
            event (`str`):
                Name of the event.
            control (`TrainerControl`):
                Trainer's.
        """
        if not self.withheld:
            return
        if event == "on_evaluate":
            self.requests.drop("should_evaluate")  # it has just been done, by a callback's own call perhaps
        self.requests.give_back(control)

    def hold_withheld(self, control: TrainerControl) -> None:
        """
        To be called after each event: takes out of Trainer's hands what waits for all ranks to hear of it.

        Args:
            control (`TrainerControl`):
                Trainer's.
        """
        self.requests.hold_back(control, self.withheld)

    def _share(self) -> None:
        """What any rank asks for holds for all. Collective over the world."""
        control = self.trainer.control
        # Before the first step there is nothing to be saved for an early end.
        to_end = self.early_end.requests() if self.at_border else {}
        asked = {flag: bool(getattr(control, flag)) for flag in FLAGS} | to_end
        rows, _ = exchange_rows({name: float(value) for name, value in asked.items()}, self.mesh)
        for flag in FLAGS:
            setattr(control, flag, any(rows[flag]))
        self.early_end.end_if_asked(control, any(rows.get(TO_END, ())))
