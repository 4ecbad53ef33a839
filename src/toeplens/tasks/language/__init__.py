"""Language modelling as a task: the next token at every position of windows of a corpus."""

from toeplens.tasks.language.corpus import Corpus
from toeplens.tasks.language.synthetic import MarkovLanguage, NestedLanguage, SyntheticLanguage
from toeplens.tasks.language.task import Language, LanguageTask

__all__ = ["Corpus", "Language", "LanguageTask", "MarkovLanguage", "NestedLanguage", "SyntheticLanguage"]
