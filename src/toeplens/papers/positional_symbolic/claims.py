"""Claims about positional and symbolic heads, frequencies and length, judged on a grid study.

They know tasks and encodings by the labels index, retrieval, mix; rope, nope, high, low, and the scan turn. The rules
were written before the study that is recorded was looked at. What was seen before: one trial of each kind of model
under another seed (7), which set the sizes of the tasks and the range of the scan.
"""

from __future__ import annotations

from toeplens.papers.positional_symbolic import checks
from toeplens.papers.positional_symbolic.checks import (
    BOTH,
    HIGH,
    INDEX,
    LOW,
    MIX,
    NOPE,
    PURE,
    RETRIEVAL,
    ROPE,
)
from toeplens.studies.grid.claims import Evidence
from toeplens.studies.kit.claims import Claim
from toeplens.studies.kit.results import ONLY_SKILLED

SISTER = "arXiv 2511.11579"
FOLLOW_UP = "arXiv 2605.31558"
PAPER = "arXiv 2505.13027"
_PAIRED = "paired over seeds"
CLAIMS: tuple[Claim[Evidence], ...] = (
    Claim(
        "exclusion",
        SISTER,
        "A head cannot be positional and symbolic at once.",
        f"No head of any model has both sampled scores (invariance, equivariance of its logits) over {BOTH:g}. The "
        "exact shares sum to at most 1 by their definition; the sampled ones are measured without it.",
        checks.exclusion,
    ),
    Claim(
        "behaviour-and-frequency",
        SISTER,
        "How positional a head is corresponds strongly to the frequencies it uses: high ones positional, low symbolic.",
        "Spearman's correlation, over all heads of a seed's RoPE models of all tasks, of the frequencies' centre "
        f"(octaves, by variance) with the positional less the symbolic share: above 0, and above 0.5. {ONLY_SKILLED}",
        checks.correspondence,
    ),
    Claim(
        "index-needs-high-frequencies",
        SISTER,
        "A positional task is learned with high frequencies and not with low ones.",
        f"Accuracy on index with the three highest frequencies alone above that with the three lowest, {_PAIRED}, by "
        "more than 0, and by more than 0.5.",
        checks.every(checks.better(INDEX, HIGH, LOW), checks.better(INDEX, HIGH, LOW, 0.5)),
    ),
    Claim(
        "retrieval-needs-low-frequencies",
        SISTER,
        "A symbolic task is learned with low frequencies and not with high ones.",
        f"Accuracy on retrieval with the three lowest frequencies alone above that with the three highest, {_PAIRED}, "
        "by more than 0, and by more than 0.25.",
        checks.every(checks.better(RETRIEVAL, LOW, HIGH), checks.better(RETRIEVAL, LOW, HIGH, 0.25)),
    ),
    Claim(
        "mix-needs-both",
        SISTER,
        "A task that is both needs both kinds of frequencies.",
        f"Accuracy on mix with all frequencies above that with the highest alone and that with the lowest, {_PAIRED}.",
        checks.every(checks.better(MIX, ROPE, HIGH), checks.better(MIX, ROPE, LOW)),
    ),
    Claim(
        "index-inverted-u",
        f"{SISTER}, frequency scan",
        "With one frequency for all pairs, accuracy on the positional task is highest in between.",
        "The inner frequency that is best on the other seeds is better than either end of the scan, over seeds.",
        checks.between(INDEX, 1),
    ),
    Claim(
        "retrieval-u",
        f"{SISTER}, frequency scan",
        "With one frequency for all pairs, accuracy on the symbolic task is lowest in between.",
        "The inner frequency that is worst on the other seeds is worse than either end of the scan, over seeds.",
        checks.between(RETRIEVAL, -1),
    ),
    Claim(
        "mix-inverted-u",
        f"{SISTER}, frequency scan",
        "With one frequency for all pairs, accuracy on the mixed task is highest in between.",
        "The inner frequency that is best on the other seeds is better than either end of the scan, over seeds.",
        checks.between(MIX, 1),
    ),
    Claim(
        "canonical-heads",
        SISTER,
        "The positional task is done by positional heads and the symbolic one by symbolic heads.",
        "Shares of RoPE's heads, weighed by what is lost without each: on index more positional than symbolic, on "
        f"retrieval more symbolic than positional, over seeds. {ONLY_SKILLED}",
        checks.every(checks.carried(INDEX, 1), checks.carried(RETRIEVAL, -1)),
    ),
    Claim(
        "canonical-tasks",
        SISTER,
        "The positional task needs a positional encoding and the symbolic one does not.",
        f"RoPE above NoPE on index by more than 0.5; NoPE above RoPE less 0.05 on retrieval, {_PAIRED}.",
        checks.every(checks.better(INDEX, ROPE, NOPE, 0.5), checks.better(RETRIEVAL, NOPE, ROPE, -0.05)),
    ),
    Claim(
        "faster-half-at-inference",
        SISTER,
        "In a trained model it is the high frequencies that the positional task hangs on.",
        "Loss gained on index when single frequencies of single heads stop turning, summed over heads: more over the "
        f"faster half than over the slower half of RoPE's frequencies, over seeds. {ONLY_SKILLED}",
        checks.turning,
    ),
    Claim(
        "positional-head-emerges",
        FOLLOW_UP,
        "Purely positional heads emerge in training.",
        "On index, the positional share of the head that matters most at the end is larger at the end than at the "
        f"beginning, and at least {PURE:g} in every seed. {ONLY_SKILLED}",
        checks.emerges(INDEX, "positional"),
    ),
    Claim(
        "symbolic-head-emerges",
        FOLLOW_UP,
        "Purely symbolic heads emerge in training.",
        "On retrieval, the symbolic share of the head that matters most at the end is larger at the end than at the "
        f"beginning, and at least {PURE:g} in every seed. {ONLY_SKILLED}",
        checks.emerges(RETRIEVAL, "symbolic"),
    ),
    Claim(
        "symbolic-extrapolates",
        FOLLOW_UP,
        "Symbolic mechanisms extrapolate in length better than positional ones.",
        "RoPE keeps more of its skill on retrieval than on index at 1.5 and at 2 times the training length, "
        f"{_PAIRED}. {ONLY_SKILLED}",
        checks.extrapolates,
    ),
    Claim(
        "positional-share-against-length",
        FOLLOW_UP,
        "The more positional what carries a model's skill, the less it extrapolates.",
        "Rank correlation over models, within tasks, of the positional share of what carries the skill with the skill "
        f"kept on longer texts: below 0 at each length, by an interval over encodings. {ONLY_SKILLED}",
        checks.related("positional", -1),
    ),
    Claim(
        "deposit-against-length",
        f"{PAPER}, appendix D",
        "The more a model's skill is deposited in one head, the less it extrapolates (a hypothesis there).",
        "Rank correlation over models, within tasks, of the largest loss by one head with the skill kept on longer "
        f"texts: below 0 at each length, by an interval over encodings. {ONLY_SKILLED}",
        checks.related("deposit", -1),
    ),
    Claim(
        "coupling-against-length",
        f"{PAPER}, appendix D",
        "The less position and content are coupled, the better a model extrapolates (a hypothesis there).",
        "Rank correlation over models, within tasks, of the interaction share of what carries the skill with the skill "
        f"kept on longer texts: below 0 at each length, by an interval over encodings. {ONLY_SKILLED}",
        checks.related("interaction", -1),
    ),
)
