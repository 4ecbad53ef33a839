"""Toeplens encodings installed in Hugging Face models; the public interface is `toeplens.hosts`."""
