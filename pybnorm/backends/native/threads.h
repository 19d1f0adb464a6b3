/* Threads, of the OpenMP runtime that is in the process: PyTorch's or oneDNN's, whose workers then wait for one another
 * nowhere. Loaded at first use, as a vendor's library is; without one the calling thread computes alone.
 */
#ifndef PYBNORM_NATIVE_THREADS_H
#define PYBNORM_NATIVE_THREADS_H

#include "pybnorm/dl.h"

static struct {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned); /* LLVM's and Intel's runtimes have it, too */
    int (*most)(void);
    int (*count)(void);
    int (*number)(void);
    int (*inside)(void);
} openmp;
static int openmp_asked; /* under the core's lock of loading */
static int openmp_lost;

struct openmp_search {
    char path[PBN_PATH_MAX];
};

/* The first library of the process that looks like an OpenMP runtime: frameworks bring theirs under names of their own. */
static int looks_like_openmp(struct dl_phdr_info *info, size_t size, void *found) {
    const char *name = info->dlpi_name != NULL ? strrchr(info->dlpi_name, '/') : NULL;
    (void)size;
    if (name == NULL || (strncmp(name, "/libgomp", 8) != 0 && strncmp(name, "/libiomp5", 9) != 0 &&
                         strncmp(name, "/libomp.", 8) != 0 && strncmp(name, "/libomp-", 8) != 0))
        return 0;
    pbn_copy_text(((struct openmp_search *)found)->path, PBN_PATH_MAX, info->dlpi_name);
    return 1;
}

static void find_openmp(void) {
    struct openmp_search search = {{0}};
    pbn_library library;
    if (openmp_asked)
        return;
    openmp_asked = 1;
    dl_iterate_phdr(looks_like_openmp, &search);
    if (pbn_dl_open(&library, search.path[0] != '\0' ? search.path : "libgomp.so.1", 0) != PBN_OK)
        return;
    void *const symbols[] = {
        pbn_dl_symbol(library.handle, "GOMP_parallel"),      pbn_dl_symbol(library.handle, "omp_get_max_threads"),
        pbn_dl_symbol(library.handle, "omp_get_num_threads"), pbn_dl_symbol(library.handle, "omp_get_thread_num"),
        pbn_dl_symbol(library.handle, "omp_in_parallel"),
    };
    for (int i = 0; i < 5; i++)
        if (symbols[i] == NULL)
            return;
    memcpy(&openmp, symbols, sizeof openmp);
}

/* A child of fork has none of the runtime's threads, and libgomp does not know: it would wait for them for ever. */
static void threads_at_fork(int stage) {
    struct openmp_search search;
    if (stage == PBN_FORK_CHILD && dl_iterate_phdr(looks_like_openmp, &search))
        openmp_lost = 1;
}

/* Threads for so many bytes, of which each takes `least` or more. */
static int64_t threads_for(int64_t bytes, int64_t least) {
    if (bytes < 2 * least || openmp.parallel == NULL || openmp_lost || openmp.inside())
        return 1;
    const int64_t most = openmp.most(), worth = bytes / least;
    return worth < most ? worth : most;
}

typedef struct team {
    void (*task)(void *data, int64_t first, int64_t end);
    void *data;
    int64_t tasks;
} team;

static void take_share(void *of) {
    const team *t = of;
    const int64_t threads = openmp.count(), thread = openmp.number();
    const int64_t first = t->tasks * thread / threads, end = t->tasks * (thread + 1) / threads;
    if (first < end)
        t->task(t->data, first, end);
}

/* Runs task(data, first, end) over all `tasks`, each thread over a share in order. What a task computes does not depend
 * on the shares, so that results do not depend on the number of threads. */
static void share_out(void (*task)(void *, int64_t, int64_t), void *data, int64_t tasks, int64_t threads) {
    team t = {task, data, tasks};
    if (threads > tasks)
        threads = tasks;
    if (threads < 2) {
        task(data, 0, tasks);
        return;
    }
    openmp.parallel(take_share, &t, (unsigned)threads, 0);
}

#endif
