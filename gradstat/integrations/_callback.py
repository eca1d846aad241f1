"""The events of the Trainer of Hugging Face transformers that its integration needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

if TYPE_CHECKING:
    from gradstat.integrations.transformers import Handle


class GradstatCallback(TrainerCallback):
    """The events of the Trainer that a `Handle` needs; added by `install`, and of no use by itself."""

    def __init__(self, handle: Handle | None = None) -> None:
        """Made by `install`.

        Raises:
            RuntimeError: There is no handle.
        """
        if handle is None:
            raise RuntimeError(
                "a callback alone cannot watch gradients: no event of the Trainer sees them complete and unclipped, "
                "and callbacks get neither trainer nor accelerator. Build the Trainer without it, then call "
                "gradstat.integrations.transformers.install(trainer), which adds it"
            )
        self._handle = handle

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Model and optimizer are what will be trained."""
        self._handle.begin(state)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The first micro-batch of a step comes next."""
        self._handle.begin_step()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Gradients are clipped; or nobody has called the clip."""
        self._handle.before_optimizer()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The optimizer has stepped."""
        self._handle.after_optimizer()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stops and saves, if so decided."""
        if self._handle.stops(state):
            control.should_training_stop = control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A checkpoint was written."""
        self._handle.save(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Reads what is left."""
        self._handle.end()
