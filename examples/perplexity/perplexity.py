"""Perplexity of texts from their log-likelihoods, as a metric for the `evaluate` library, without the Hub.

metric = evaluate.load("examples/perplexity")
"""

import math

import datasets
import evaluate

DESCRIPTION = """\
Perplexity per token and bits per byte of texts. Sums are in double precision over all texts, so that long texts count
for more than short ones: perplexity = exp(-sum(log-likelihoods) / sum(tokens)).
"""
INPUTS = """\
Args:
    predictions: log-likelihood of each text in nats, the sum over its predicted tokens.
    references: for each text the numbers of tokens and of UTF-8 bytes that were predicted, [tokens, bytes].
Returns:
    perplexity, bits_per_byte.
"""


class Perplexity(evaluate.Metric):
    """The metric; see `INPUTS`."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features(
                {"predictions": datasets.Value("float64"), "references": datasets.Sequence(datasets.Value("int64"))}
            ),
        )

    def _compute(self, predictions: list[float], references: list[list[int]]) -> dict[str, float]:
        nats = -math.fsum(predictions)
        tokens, num_bytes = (sum(counts) for counts in zip(*references, strict=True))
        return {"perplexity": math.exp(nats / tokens), "bits_per_byte": nats / math.log(2) / num_bytes}
