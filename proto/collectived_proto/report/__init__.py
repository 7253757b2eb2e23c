"""Texts about status that the commands, the web page and the daemons share."""
