"""A network as FSDP2 wants it: parameters by name and what is computed with them, whole or in shares.

Where several processes train it (`ranks.Ranks.shard`), each keeps a share of every parameter: some of the rows of its
first dimension. The whole is there during a call and the backward pass that follows, and at no other time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

Parameters = dict[str, Tensor]


class Network(nn.Module):
    """Called with what `compute` takes besides the parameters by name.

    Attributes:
        shapes: of the whole parameters, by name.
        sharded: whether several processes have it among them.
    """

    def __init__(self, parameters: Mapping[str, Tensor], compute: Callable[..., Any], *, trained: bool = True) -> None:
        """Takes the parameters' memory over. `trained`: whether they get gradients."""
        super().__init__()
        self._compute = compute
        self.shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        self.sharded = False
        for name, p in parameters.items():  # torch allows no dot in a name
            self.register_parameter(name.replace(".", "/"), nn.Parameter(p.detach(), requires_grad=trained))
        self._whole = self._named()

    def was_sharded(self) -> None:
        """From now on each process has a share only: lets go of the whole."""
        self.sharded, self._whole = True, {}

    def twin(self) -> Network:
        """One with copies of the parameters, which get no gradients. Only before it is sharded."""
        return Network({name: p.detach().clone() for name, p in self._named().items()}, self._compute, trained=False)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Straight to `compute` where nothing has to be gathered: a module's call costs a small network a percent."""
        return super().__call__(*args, **options) if self.sharded else self._compute(self._whole, *args, **options)

    def forward(self, *args: Any, **options: Any) -> Any:
        return self._compute(self._named(), *args, **options)

    def shares(self) -> Parameters:
        """This process's share of each parameter, in the memory that is trained; all of it where it is not sharded."""
        if not self.sharded:
            return self._whole
        with torch.no_grad():  # then it is the very memory, and no node of a graph
            return {name: cast(Any, p).to_local().detach() for name, p in self._named().items()}

    def hand_gradients_to(self, shares: Parameters) -> None:
        """Moves what a backward pass has left of gradients, the mean over all processes, to the `shares`."""
        with torch.no_grad():
            for name, p in self._named().items():
                shares[name].grad = None if p.grad is None else cast(Any, p.grad).to_local()
                p.grad = None

    def _named(self) -> Parameters:
        return dict(zip(self.shapes, cast(Mapping[str, Tensor], self._parameters).values(), strict=True))
