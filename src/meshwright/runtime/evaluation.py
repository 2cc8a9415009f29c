"""Evaluate a run on the data of `Job(evaluation=...)`: every sample once, under every strategy."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from meshwright.assemble.batch import Batch
from meshwright.assemble.passes import Dropout
from meshwright.assemble.step import Trainer
from meshwright.describe.data_source import about_evaluation
from meshwright.describe.samples import Cutter
from meshwright.errors import JobError
from meshwright.facts.evaluation import EMA
from meshwright.runtime.agreement import Agreement
from meshwright.runtime.data import Loader
from meshwright.runtime.open_loader import samples_of, user_order
from meshwright.runtime.order import Order


class EvaluationData:
    """The evaluation batches of one rank, and what is measured on them."""

    def __init__(self, trainer: Trainer, *, workers: int = 0) -> None:
        if trainer.job.evaluation is None:
            raise JobError("This job has no evaluation data; give Job(evaluation=Evaluation(data=...)).")
        self._trainer, self._evaluation = trainer, trainer.job.evaluation
        self._job, self._workers = trainer.job.for_evaluation(), workers
        self._cutter = Cutter(self._job)
        with about_evaluation():
            self._order = self._make_order()

    def _make_order(self) -> Order:
        source, trainer = self._cutter.opened, self._trainer
        user = user_order(source, self._job, trainer.seed)
        return Order(
            samples=samples_of(source, user),
            global_batch=self._job.global_batch,
            seed=trainer.seed,
            share=trainer.share,
            drop_last=source.drop_last,
            user=user,
            shuffled=False,
        )

    def measure(self, batches: int | None = None) -> dict[str, float]:
        """The loss and the metrics, the same on all ranks; at most `batches` batches are read."""
        metrics, averaged = self._evaluation.measured(), self._evaluation.weights == EMA
        with about_evaluation():
            return self._trainer.measure(self._batches(batches), metrics, averaged=averaged)

    def _batches(self, most: int | None) -> Iterator[Batch]:
        """One epoch. Generators are seeded for each batch, so that a model that draws in `eval()` draws the same."""
        trainer = self._trainer
        loader = Loader(
            self._job,
            self._order,
            device=trainer.world.device,
            cutter=self._cutter,
            weighed=trainer.facts.weight_per_sample is not None,
            workers=self._workers,
            agreement=None if self._order.is_known else Agreement(trainer.world),
        )
        dropout = Dropout(run_seed=trainer.seed, device=trainer.world.device)
        for number, batch in enumerate(islice(loader.batches(epochs=1), most)):
            dropout.seed(0, number * self._order.global_batch)
            yield batch
