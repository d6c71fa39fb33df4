"""What ``datasets`` asks torchcodec for, whose wheels need ffmpeg: here soundfile reads."""

__version__ = "0.7.0"
