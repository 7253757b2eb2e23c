"""Reductions over the devices of one client, as tf.distribute has them; the public names are in `distribute`."""
