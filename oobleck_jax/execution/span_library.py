"""The spans made so far, each kept for the life of the home, so that nothing is traced or compiled twice."""

from collections.abc import Mapping

from oobleck_jax.execution.home import Home, StageDevices
from oobleck_jax.execution.layer_functions import LayerFunctions
from oobleck_jax.execution.span import Span, SpanKey
from oobleck_jax.execution.split_span import SplitSpan


class SpanLibrary:
    """The spans of a home."""

    def __init__(self, home: Home, functions: Mapping[str, LayerFunctions]) -> None:
        self._home, self._functions = home, functions

    def span(self, key: SpanKey, devices: StageDevices) -> Span:
        """Return the span of a key; `devices` are those that the key names."""
        if key not in self._home.spans:
            functions = self._functions[key.kind]
            self._home.spans[key] = Span(key=key, functions=functions, home=self._home, devices=devices)
        return self._home.spans[key]

    def split_span(self, key: SpanKey, devices: StageDevices) -> SplitSpan:
        """Return the same span with a split backward."""
        split = (key, "split")
        if split not in self._home.spans:
            self._home.spans[split] = SplitSpan(span=self.span(key, devices))
        return self._home.spans[split]
