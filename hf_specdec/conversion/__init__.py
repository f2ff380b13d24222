"""Checkpoints of MLP speculators from one format to another, without losing a tensor."""

from hf_specdec.conversion.convert import ConvertOptions, convert
from hf_specdec.conversion.report import ConversionReport, TensorRow

__all__ = ["ConversionReport", "ConvertOptions", "TensorRow", "convert"]
