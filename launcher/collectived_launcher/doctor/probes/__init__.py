"""Thin looks at the real machine: each gathers one part of the facts, changes nothing, and judges nothing."""
