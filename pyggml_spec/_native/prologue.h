// Put in front of the generated binding: the headers that cdef.h was made from, and the log of this flavour.

#include "ggml.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"

#include "ggml-spec.h"
#include "ggml-spec-attention.h"
#include "ggml-spec-block-conv.h"
#include "ggml-spec-graph.h"
#include "ggml-spec-norms.h"

#include <pthread.h>
#include <string.h>

#define PYGGML_SPEC_LOG_BYTES 8192

// ggml logs to stderr unless told otherwise; a library must not. The newest text is kept for error messages.
static struct {
    pthread_mutex_t lock;
    size_t used;
    char text[PYGGML_SPEC_LOG_BYTES];
} pyggml_spec_log = { PTHREAD_MUTEX_INITIALIZER, 0, { 0 } };

static void pyggml_spec_log_keep(enum ggml_log_level level, const char * text, void * user_data) {
    (void) user_data;
    size_t n = strlen(text);
    if (level == GGML_LOG_LEVEL_DEBUG || n >= PYGGML_SPEC_LOG_BYTES) {
        return;
    }
    pthread_mutex_lock(&pyggml_spec_log.lock);
    if (pyggml_spec_log.used + n > PYGGML_SPEC_LOG_BYTES) {
        size_t drop = pyggml_spec_log.used + n - PYGGML_SPEC_LOG_BYTES;
        memmove(pyggml_spec_log.text, pyggml_spec_log.text + drop, pyggml_spec_log.used - drop);
        pyggml_spec_log.used -= drop;
    }
    memcpy(pyggml_spec_log.text + pyggml_spec_log.used, text, n);
    pyggml_spec_log.used += n;
    pthread_mutex_unlock(&pyggml_spec_log.lock);
}

// Route ggml's log into the kept text.
static void pyggml_spec_log_install(void) {
    ggml_log_set(pyggml_spec_log_keep, NULL);
}

// Copy the newest bytes of the log, at most size of them, without a terminating zero; returns how many.
static size_t pyggml_spec_log_tail(char * out, size_t size) {
    pthread_mutex_lock(&pyggml_spec_log.lock);
    size_t n = size < pyggml_spec_log.used ? size : pyggml_spec_log.used;
    memcpy(out, pyggml_spec_log.text + pyggml_spec_log.used - n, n);
    pthread_mutex_unlock(&pyggml_spec_log.lock);
    return n;
}
