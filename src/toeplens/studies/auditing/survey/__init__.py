"""A survey of the models of the installed transformers: which of them an audit can take apart, proved on each."""

from toeplens.studies.auditing.survey.models import model_types
from toeplens.studies.auditing.survey.record import COLUMNS, OUTCOMES, Outcome, Survey, Surveyed
from toeplens.studies.auditing.survey.run import RESULT, survey

__all__ = ["COLUMNS", "OUTCOMES", "RESULT", "Outcome", "Survey", "Surveyed", "model_types", "survey"]
