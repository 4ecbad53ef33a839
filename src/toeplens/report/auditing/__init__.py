"""The pages of audits: of one model, and of two side by side."""
