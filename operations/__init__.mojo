"""Convolutions for MAX graphs; loading this package registers its ops."""

from .registrations import Conv, ConvFusedInput, Explain
