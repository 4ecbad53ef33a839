"""Audits of many models: one request, each model in a process of its own, here or on a cluster, each in a directory."""

from toeplens.studies.auditing.many.apart import Audited, Audits
from toeplens.studies.auditing.many.request import Request, audit_in
from toeplens.studies.auditing.many.run import RESULT, audit_many, directories_of

__all__ = ["RESULT", "Audited", "Audits", "Request", "audit_in", "audit_many", "directories_of"]
