"""What the native extension must be built from; vendor/upstream.txt and upstream.toml say the same to the build."""

GGML_VERSION = "0.25.3"
GGML_COMMIT = "832db0699007"  # the first digits of the pinned archive's sha256: archives carry no git commit
