"""Instances whose values lie on GPUs: folded there, or carried out by NCCL."""
