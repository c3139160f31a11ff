"""Codecs turn a layer slice into fewer bytes and back."""
