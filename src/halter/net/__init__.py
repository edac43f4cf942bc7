"""Outgoing HTTP: every request of this program to another machine is sent from here."""
