"""The launcher: starts, watches and stops the ranks. Runs on the host and needs no torch."""

from __future__ import annotations
