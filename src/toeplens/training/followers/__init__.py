"""Following a run elsewhere: what a follower is, how it is told, and TensorBoard, Weights & Biases and MLflow."""

from toeplens.training.followers.names import FOLLOWERS, followers_named, made_ready, must_be_installed
from toeplens.training.followers.protocol import Follower, RunEnd, RunFacts, figures
from toeplens.training.followers.telling import LOG, Followed, heard

__all__ = [
    "FOLLOWERS",
    "LOG",
    "Followed",
    "Follower",
    "RunEnd",
    "RunFacts",
    "figures",
    "followers_named",
    "heard",
    "made_ready",
    "must_be_installed",
]
