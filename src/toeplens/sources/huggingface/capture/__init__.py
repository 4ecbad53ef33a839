"""Capture of attention: a pass whose attention calls are decomposed one by one and verified."""
