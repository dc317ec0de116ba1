"""Calibrations by runs that were observed: what a log, traces and memory say about the hardware they ran on."""
