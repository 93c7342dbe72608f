"""The account of data: how many tokens a model needs, how often it may see them again, what is wrong with them.

Idea    A budget of FLOPs is shared between parameters and tokens; for the best loss both grow alike, about 20 tokens
        for each parameter, and models that will be used a lot are trained on far more. Clean text is finite: the second
        time it teaches almost as much as the first, the fortieth time nothing. Duplicates are repetition that nobody
        asked for, and text of the test set among them makes its score worthless.
Source  Hoffmann et al. 2022 (Chinchilla) for 20; Llama team 2024, section 3.2.1, for the other law; Muennighoff et al.
        2023, 'Scaling Data-Constrained Language Models', equation 5, for repetition; Brown et al. 2020, appendix C, for
        13-grams; Lee et al. 2022 for duplicates.
Read    `corpus.py`, which counts these in real text.
"""

from __future__ import annotations

from math import exp, sqrt

from minipar.compute import positive

TOKENS_PER_PARAMETER = 20.0
REPETITIONS = 15.39  # how many further epochs are worth anything: R* of Muennighoff et al. 2023


def tokens_needed(parameters: float, tokens_per_parameter: float = TOKENS_PER_PARAMETER) -> float:
    """Tokens for a model: 20 for each parameter where training alone is to be paid; Llama 3 8B saw 1,875."""
    positive(parameters=parameters, tokens_per_parameter=tokens_per_parameter)
    return parameters * tokens_per_parameter


def best_parameters(flops: float, tokens_per_parameter: float = TOKENS_PER_PARAMETER) -> float:
    """Parameters of the model with the least loss for so many FLOPs: `sqrt(C / 6 r)`, on r tokens for each."""
    positive(flops=flops, tokens_per_parameter=tokens_per_parameter)
    return sqrt(flops / (6.0 * tokens_per_parameter))


def best_tokens(flops: float, *, factor: float = 0.299, exponent: float = 0.537) -> float:
    """Tokens for so many FLOPs by Llama 3's law, `A C^alpha`, which was fitted to its own data."""
    positive(flops=flops, factor=factor, exponent=exponent)
    return float(factor * flops**exponent)


def epochs(tokens: float, unique_tokens: float) -> float:
    """How many times the text is seen."""
    positive(tokens=tokens, unique_tokens=unique_tokens)
    return tokens / unique_tokens


def tokens_worth(tokens: float, unique_tokens: float, repetitions: float = REPETITIONS) -> float:
    """How many fresh tokens the same tokens are worth: `U + U R* (1 - exp(-R / R*))`, with R further epochs.

    Four epochs are worth 0.93 of as many fresh ones, sixteen 0.66 and forty 0.38.
    """
    positive(tokens=tokens, unique_tokens=unique_tokens, repetitions=repetitions)
    again = tokens / unique_tokens - 1
    if again <= 0:
        return tokens
    return unique_tokens * (1 + repetitions * (1 - exp(-again / repetitions)))


def text_bytes(tokens: float, bytes_per_token: float = 4.0) -> float:
    """Bytes of text: about four for each token of English."""
    positive(tokens=tokens, bytes_per_token=bytes_per_token)
    return tokens * bytes_per_token


def crawled_tokens(tokens: float, *, kept: float, duplicates: float) -> float:
    """Tokens to collect so that `tokens` are left: a share `duplicates` of them are copies, and of the rest filters
    keep a share `kept`. Raises `ValueError` for what are no shares, or where nothing would be left."""
    positive(tokens=tokens, kept=kept)
    if not (kept <= 1 and 0 <= duplicates < 1):
        raise ValueError(f"kept={kept} and duplicates={duplicates} are shares: choose kept up to 1, duplicates below 1")
    return tokens / (kept * (1 - duplicates))


def true_score(seen_score: float, *, contaminated: float, contaminated_score: float = 1.0) -> float:
    """The score on questions that were not in the training text, when a share `contaminated` of them was, and was
    answered with `contaminated_score`. All are shares from 0 to 1."""
    for name, value in (("seen_score", seen_score), ("contaminated_score", contaminated_score)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name}={value} is a share: choose from 0 to 1")
    if not 0 <= contaminated < 1:
        raise ValueError(f"contaminated={contaminated} is a share below 1")
    return max(0.0, (seen_score - contaminated * contaminated_score) / (1 - contaminated))
