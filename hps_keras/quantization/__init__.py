"""Fewer bits on the wire: codecs and their kernels, error feedback, and the policies that choose the widths."""
