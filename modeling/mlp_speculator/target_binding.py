"""What a speculator takes from its target: token tables, and the ids that it drafts.

Boundary: the methods of the model; how tables are checked and cut is `target_tables`' business.
"""

import copy
from typing import Any, TypeVar

from torch import Tensor

from .arguments import check_draft_token_ids
from .configuration_mlp_speculator import MLPSpeculatorConfig
from .network import MLPSpeculatorNetwork
from .target_tables import borrow

# typing.Self is not in Python 3.10.
Bound = TypeVar("Bound", bound="TargetBinding")


class TargetBinding:
    """Goes before ``PreTrainedModel`` in the speculator's bases."""

    config: MLPSpeculatorConfig
    speculator: MLPSpeculatorNetwork
    _modules: dict[str, Any]

    def bind_target(self, input_embeddings_weight: Tensor, lm_head_weight: Tensor) -> None:
        """Lend the target's token tables to a speculator with ``share_target_weights``.

        The tables are referred to, not copied, unless the dtype differs (one cast) or the draft
        vocabulary is reduced (its ``lm_head`` rows are gathered). They are neither saved nor moved
        with the speculator, and receive no gradient. Binding the same, unchanged tensors again does
        nothing; after the target, the speculator's device or its dtype changed, bind again.

        Args:
            input_embeddings_weight: the target's input embedding [>= V, d].
            lm_head_weight: the target's output weight [>= V, d].

        Raises:
            ValueError: without ``share_target_weights``, or for a table of the wrong shape, dtype
                or device.
        """
        if not self.config.share_target_weights:
            raise ValueError(
                "bind_target is for a speculator with share_target_weights=True; this one has "
                "its own emb and head weights and needs no target"
            )
        self.speculator.target_tables = borrow(
            self.config,
            input_embeddings_weight,
            lm_head_weight,
            self.speculator.draft_token_ids,
            self.speculator.reference,
            self.speculator.target_tables,
        )

    def bound_to(self: Bound, input_embeddings_weight: Tensor, lm_head_weight: Tensor) -> Bound:
        """A second model with the same weights that stays bound to these tables.

        Unlike the model that ``bind_target`` was called on, it is not affected when another thread
        binds another target. Arguments and errors are those of ``bind_target``.
        """
        self.bind_target(input_embeddings_weight, lm_head_weight)
        view, network = copy.copy(self), copy.copy(self.speculator)
        # Not self.speculator's tables: they may be another thread's by now.
        network.target_tables = borrow(
            self.config,
            input_embeddings_weight,
            lm_head_weight,
            network.draft_token_ids,
            network.reference,
            self.speculator.target_tables,
        )
        view._modules = {**self._modules, "speculator": network}
        return view

    def set_draft_token_ids(self, token_ids: Tensor) -> None:
        """Name the target ids a reduced draft vocabulary covers; before this they are 0 .. Vd-1.

        A target that was bound has to be bound again.

        Args:
            token_ids: distinct target ids, int64 [Vd]. They are saved with the weights.

        Raises:
            ValueError: without ``draft_vocab_size``, or for ids that are not Vd distinct ones
                below V.
        """
        buffer = self.speculator.draft_token_ids
        if buffer is None:
            raise ValueError(
                "set_draft_token_ids needs a config with draft_vocab_size > 0, it is 0"
            )
        check_draft_token_ids(self.config, token_ids)
        buffer.copy_(token_ids)
        # Its lm_head rows were gathered for the ids before.
        self.speculator.target_tables = None
