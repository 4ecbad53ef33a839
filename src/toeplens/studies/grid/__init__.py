"""Custom studies from a YAML file: a grid of tasks by encodings."""

from toeplens.studies.grid.measured import FIGURES, Point, Relation, Row
from toeplens.studies.grid.spec import Column, GridSpec, grid_spec, read_spec, specs
from toeplens.studies.grid.study import Evidence, Grid, cells, gather, is_grid, study

__all__ = [
    "FIGURES",
    "Column",
    "Evidence",
    "Grid",
    "GridSpec",
    "Point",
    "Relation",
    "Row",
    "cells",
    "gather",
    "grid_spec",
    "is_grid",
    "read_spec",
    "specs",
    "study",
]
