"""A run from its first step to its record: what the training loop and a caller's own loop share."""

import contextlib
import gc
import itertools
import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from shardwise.assembly.build import Job
from shardwise.assembly.moved import MovedState
from shardwise.base.batches import AnyBatch, positions_of
from shardwise.base.interfaces import Evaluation, Mesh
from shardwise.base.process.ending import RunError, Stopped
from shardwise.base.process.stop import agreed_signal, on_signals
from shardwise.base.process.watchdog import beat
from shardwise.base.records.record import RunRecord
from shardwise.checkpoint.checkpointer import Checkpointer
from shardwise.checkpoint.export import save_result
from shardwise.checkpoint.output_dir import reference_file, writing
from shardwise.checkpoint.resume import Start
from shardwise.config import RunConfig, UserError, require
from shardwise.data.loader import Loaders
from shardwise.metrics.meter import Meter
from shardwise.metrics.spacing import unmoved_note
from shardwise.models.load import check_computes
from shardwise.parallel import copies
from shardwise.parallel.reduce import from_every_rank
from shardwise.training.evaluate import evaluate
from shardwise.training.instruments import StepObserver
from shardwise.training.measure import add_to_record, measure_memory, write_record
from shardwise.training.reference_sums import ReferenceSums
from shardwise.training.reporter import Reporter
from shardwise.training.resplit import Watch
from shardwise.training.step import NonFiniteLossError, StepResult, training_step


class Session:
    """A run on this rank, as a context manager.

    It makes steps, evaluates, saves, reports and ends the run; which rows are read, and when the
    loss is evaluated, its caller says. Every method is a collective: each rank calls the same ones.
    """

    def __init__(
        self,
        cfg: RunConfig,
        mesh: Mesh,
        job: Job,
        start: Start,
        loaders: Loaders,
        meter: Meter,
        observer: StepObserver,
    ) -> None:
        """Take a job that was built, what says where the data are, and what measures its steps."""
        self.cfg, self.mesh, self.job = cfg, mesh, job
        self.done = start.step
        """Optimizer steps done, in this run and the one that it resumes."""
        self.slots = mesh.slots(cfg.training.global_batch_size)
        """The rows of each global batch that this rank reads."""
        self.reporter = Reporter(cfg, mesh, job, start)
        if start.step == 0:
            self.reporter.say(loaders.sample)
        for note in loaders.notes:
            self.reporter.note(note)
        self._checkpointer = Checkpointer(
            cfg, job, loaders, start, self._check_copies, self.reporter.checkpoint
        )
        self._began = start.step
        self._checked = start.step  # the step after which copies were compared last
        self._meter, self._observer = meter, observer
        self._signals: list[int] = []
        self._watch = Watch(cfg, mesh, job) if cfg.parallel.split == "dynamic" else None
        self._number = 0  # of the step that `steps` has given; 0 when it is over
        self._evaluation: Evaluation | None = None  # after it
        self._record: RunRecord | None = None
        self._start = start
        self._sums: ReferenceSums | None = None
        self._is_open = False  # from the beginning of the context to `finish`
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:  # closes what is open where one of these fails
            stack.callback(self.job.pm.storage.close)
            stack.enter_context(writing(self.cfg))
            stack.enter_context(self.reporter)
            stack.enter_context(self._checkpointer)
            stack.enter_context(on_signals(self._signals.append))
            self._stack = stack.pop_all()
        named = self.job.pm.named_parameters()
        if note := unmoved_note(named, self.cfg, from_every_rank):
            self.reporter.note(note)
        self._is_open = True
        return self

    def __exit__(self, *error: Any) -> bool | None:
        self._is_open = False
        is_handled = self._stack.__exit__(*error)
        is_own = isinstance(error[1], UserError | RunError | Stopped) or self.job.run.spec.is_own
        if isinstance(error[1], Exception) and not is_own and self.done == self._began:
            check_computes(self.cfg.model)  # whose fault a first step's error is
        return is_handled

    def read_reference(self, loaders: Loaders) -> None:
        """Let the reference compute for all steps, or read what it has computed, where it is to."""
        if not self.cfg.precomputes:
            return
        self._sums = ReferenceSums(reference_file(self.cfg))
        if self._start.folder is not None:
            self._sums.read(reference_file(self.cfg, self._start.folder))
        else:
            self._compute_reference(self._sums, loaders)
        self._checkpointer.read_beside(self._sums.path)
        self._sums.use_in(self.job.pm)

    def _compute_reference(self, sums: ReferenceSums, loaders: Loaders) -> None:
        num_steps = self.job.num_steps
        self.reporter.say(lambda: f"the reference computes the answers of {num_steps:,} steps")
        with contextlib.closing(loaders.again()) as steps:
            read = itertools.chain(itertools.islice(steps, num_steps), loaders.validation or ())
            for number in sums.compute(self.job.pm, read):
                beat()
                if signal := agreed_signal(self._signals, self.mesh):
                    raise Stopped(signal, 0, None)
                self.reporter.computed(number)

    def _check_open(self, method: str) -> None:
        """Raise UserError where the run has not begun or is over: its record would be wrong."""
        require(
            self._is_open,
            f"`{method}` was called outside of the run, which is the block of `with prepare(...)` "
            "up to `finish`; call it there",
        )

    def steps(self) -> Generator[int]:
        """Yield the number of each step that is left; the caller calls `step` once for each.

        Between two steps the run is saved where `training.save_every` or `keep_best` says so, and
        ends if a signal or `training.patience` asks for that. The wait for data counts as time of
        the step.
        """
        for number in self.reporter.steps_left():
            self._check_open("steps")
            self._meter.start()
            self._number, self._evaluation = number, None
            yield number
            require(self.done == number, f"the loop did not call `step` in step {number}; call it")
            self._checkpointer.after_step(number, self._evaluation)
            self._number, self._evaluation = 0, None
            beat()
            if number < self.job.num_steps and (signal := agreed_signal(self._signals, self.mesh)):
                raise Stopped(signal, number, self._checkpointer.stop(number))
            if self._watch is not None:
                self._resplit(self._watch)

    def step(self, microbatches: Sequence[AnyBatch]) -> StepResult:
        """Do the next optimizer step, on this rank's micro-batches of its global batch.

        UserError, with the rows of this rank in a file, if the loss is not finite.
        """
        self._check_open("step")
        number = self.done + 1
        require(
            number == self._number,
            f"`step` was called for step {number} when it was not its turn; call it once for each "
            "number that `steps()` gives",
        )
        microbatches = [batch.to(self.mesh.device) for batch in microbatches]
        if self.cfg.measure.reverse_microbatches:
            microbatches.reverse()
        lr = self.job.optimizer.param_groups[0]["lr"]
        max_norm = self.cfg.optimizer.max_grad_norm
        try:
            with self._observer.watching(self.job, microbatches, len(self._meter.seconds) + 1):
                result = training_step(self.job, microbatches, self.mesh, max_norm)
        except NonFiniteLossError as error:
            raise self.reporter.non_finite(number, microbatches, error) from None
        self._meter.stop(result.tokens, positions_of(microbatches))
        events = self.job.pm.events()
        self._observer.took(events)
        if self._watch is not None:
            self._watch.step(events)
        self.reporter.step(number, result, lr, self._meter)
        self.done = number
        if (every := self.cfg.training.check_copies_every) and number % every == 0:
            self._check_copies(number)
        return result

    def _resplit(self, watch: Watch) -> None:
        """Move layers between the ranks of a pipeline, if the times of its steps say so."""
        proposal = watch.proposal(self.job, self.job.num_steps - self.done)
        self.reporter.resplit_took(watch.measured(self.job))
        if proposal is None:
            return
        begin, job = time.perf_counter(), self.job
        assert job.cut is not None
        layers, rebuild, routing = job.cut.split.layers, job.rebuild, job.routing
        state = MovedState(job, self.cfg, self.done)
        state.move(job, self.mesh, proposal.boundaries)
        # Nothing but `state` holds the old tensors now, which are released as they are read.
        del job, self.job, self._checkpointer.job
        gc.collect()
        parallel = replace(self.cfg.parallel, split=list(proposal.layers))
        rebuilt = rebuild(replace(self.cfg, parallel=parallel), state)
        self.job = self._checkpointer.job = replace(rebuilt, routing=routing)
        if self._sums is not None:
            self._sums.use_in(self.job.pm)
        self._observer.moved()
        # A number from every rank to all, who are ready then.
        num_bytes = sum(from_every_rank(state.moved_bytes)) // self.mesh.size("pp")
        seconds = time.perf_counter() - begin
        watch.begin(seconds)
        self.reporter.resplit(self.done, layers, proposal, num_bytes, seconds)

    def _check_copies(self, step: int) -> None:
        """Compare the copies of weights, if the run asks for it; RunError if some differ."""
        if self.cfg.training.check_copies_every == 0 or self._checked == step:
            return
        if found := copies.differences(self.job.pm, self.mesh, self.job.optimizer):
            raise RunError(
                f"step {step}: {copies.explain(found)} (equal after step {self._checked}): "
                "a device or its memory computes wrong numbers; look at it, then resume with "
                "--resume latest, since copies were equal when a checkpoint was saved"
            )
        self._checked = step

    def evaluate(self, batches: Iterable[Sequence[AnyBatch]]) -> Evaluation:
        """Evaluate and report the loss on this rank's micro-batches of each global batch.

        With `keep_best` it comes before the step is saved: a checkpoint names the best one.
        """
        self._check_open("evaluate")
        is_late = self._checkpointer.has(self.done) or 0 < self.done < self._number
        require(
            not (self.cfg.training.keep_best and is_late),
            f"step {self.done} is over or saved already, and training.keep_best needs its "
            "evaluation before that; call `evaluate` after `step`, and before `save`",
        )
        self._evaluation = self.reporter.evaluation(
            evaluate(self.job.pm, batches, self.mesh, self.done)
        )
        return self._evaluation

    def log(self, **values: float) -> None:
        """Add numbers to `metrics.jsonl` and the trackers, at the step that was done last."""
        self._check_open("log")
        self.reporter.log(self.done, values)

    def save(self) -> None:
        """Save a checkpoint now, after `evaluate` if there is one, whatever `save_every` says."""
        self._check_open("save")
        self._checkpointer.after_step(self.done, self._evaluation, is_asked_for=True)

    def finish(self, tokenizer: PreTrainedTokenizerBase | None = None) -> RunRecord | None:
        """Save the result, with the tokenizer, and the record, which is returned on rank 0."""
        self._check_open("finish")
        self._is_open = False
        if self.done < self.job.num_steps and self.reporter.early_stop is None:
            self.reporter.note(f"ended after step {self.done} of {self.job.num_steps}")
        # The loop was left within this step, or has evaluated after its last one.
        if self.done > 0 and (self._number == self.done or self._evaluation is not None):
            self._checkpointer.after_step(self.done, self._evaluation)
        self._checkpointer.finish()
        self.reporter.saved(self._checkpointer.load_best(self.reporter.note))
        # The result and the record come before what may fail.
        folder = Path(self.cfg.training.output_dir)
        result = save_result(self.job, self.cfg, self.mesh, folder, tokenizer, self.reporter.note)
        self.reporter.result(result)
        self.reporter.check_folder()
        self._record = write_record(self.cfg, self.mesh, self.job, self.reporter, self._meter)
        fields = self._observer.fields_of_pipeline(self.job)
        return self.add(**fields) if fields else self._record

    def add(self, **fields: Any) -> RunRecord | None:
        """Add fields to the record of a finished run, which is returned on rank 0."""
        self._record = add_to_record(self.cfg, self._record, **fields)
        return self._record

    def measure_memory(self, microbatches: Sequence[AnyBatch]) -> RunRecord | None:
        """Add the memory of one more step, and what a step sends, to the record of rank 0.

        The step changes the weights, after everything is saved.
        """
        self.reporter.measuring_memory()
        memory = measure_memory(self.job, microbatches, self.mesh, self.cfg)
        self.add(**memory.fields())
        fields = self._observer.fields_of_bytes(self.job, self.reporter.note)
        return self.add(**fields, notes=[*self.reporter.notes])
