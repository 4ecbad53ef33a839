"""Appendix C.4 of arXiv 2505.13027 v1: can the position component be taken out, and is it a curve?"""
