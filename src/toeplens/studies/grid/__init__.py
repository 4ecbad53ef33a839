"""Custom studies from a YAML file: a grid of tasks by encodings."""

from toeplens.studies.grid.measures import HEAD_PROPERTIES, GridRow, ModelPoint, RankRelation
from toeplens.studies.grid.spec import EncodingColumn, GridSpec, grid_spec, read_spec, spec_names
from toeplens.studies.grid.study import ClaimData, GridStudy, gather, grid_cells, is_grid, run_study

__all__ = [
    "HEAD_PROPERTIES",
    "ClaimData",
    "EncodingColumn",
    "GridRow",
    "GridSpec",
    "GridStudy",
    "ModelPoint",
    "RankRelation",
    "gather",
    "grid_cells",
    "grid_spec",
    "is_grid",
    "read_spec",
    "run_study",
    "spec_names",
]
