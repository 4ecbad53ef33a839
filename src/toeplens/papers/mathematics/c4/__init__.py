"""Appendix C.4 of arXiv 2505.13027 v1: can the position component be extracted, and is it a curve?"""
