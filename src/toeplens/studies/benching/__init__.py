"""How fast this installation is: our programs against others that do the same, taken in turn, on this machine."""

from toeplens.studies.benching.bench import CONTESTS, RECORD, bench, save_bench
from toeplens.studies.benching.record import BenchRecord, Contest, Timed, not_negative

__all__ = ["CONTESTS", "RECORD", "BenchRecord", "Contest", "Timed", "bench", "not_negative", "save_bench"]
