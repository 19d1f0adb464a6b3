/* What the stand-ins for AMD's compilers share: a compiler is a script that gets options, -o OUTPUT and a SOURCE. */
#include <errno.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
#define FOLDER "/opt/stand-ins/"

extern char **environ;

struct bytes {
    char *data; /* ends with a 0 that is not counted */
    size_t size;
};

static inline struct bytes copy_bytes(const void *data, size_t size) {
    struct bytes b = {malloc(size + 1), size};
    if (b.data != NULL) {
        memcpy(b.data, data, size);
        b.data[size] = '\0';
    }
    return b;
}

static inline char *join(const char *folder, const char *name) {
    const char *last = strrchr(name, '/');
    char *path = NULL;
    return asprintf(&path, "%s/%s", folder, last != NULL ? last + 1 : name) < 0 ? NULL : path;
}

static inline int write_file(const char *path, const char *data, size_t size) {
    FILE *f = path != NULL ? fopen(path, "wb") : NULL;
    int good = f != NULL && fwrite(data, 1, size, f) == size;
    return (f == NULL || fclose(f) == 0) && good;
}

static inline struct bytes read_file(const char *path) {
    struct bytes b = {NULL, 0};
    FILE *f = path != NULL ? fopen(path, "rb") : NULL;
    if (f == NULL)
        return b;
    long size = fseek(f, 0, SEEK_END) == 0 ? ftell(f) : -1;
    if (size >= 0 && fseek(f, 0, SEEK_SET) == 0 && (b.data = malloc((size_t)size + 1)) != NULL) {
        b.size = fread(b.data, 1, (size_t)size, f);
        b.data[b.size] = '\0';
    }
    fclose(f);
    return b;
}

/* Runs a script of FOLDER on the first of the files; the others lie beside it. The result, or its data NULL; *log gets
 * what the script said. */
static inline struct bytes compile(const char *script, size_t count, const char *const names[],
                                   const struct bytes files[], size_t options_count, char *const options[],
                                   struct bytes *log) {
    struct bytes result = {NULL, 0};
    char folder[] = "/tmp/compile-stub.XXXXXX";
    char **paths = calloc(count + 2, sizeof *paths);
    const char **arguments = calloc(options_count + 5, sizeof *arguments);
    posix_spawn_file_actions_t actions;
    *log = copy_bytes("", 0);
    if (paths == NULL || arguments == NULL || mkdtemp(folder) == NULL) {
        free(paths);
        free(arguments);
        return result;
    }
    int good = (paths[count] = join(folder, "compiled.out")) != NULL && (paths[count + 1] = join(folder, "said.txt")) != NULL;
    for (size_t i = 0; i < count && good; i++)
        good = write_file(paths[i] = join(folder, names[i]), files[i].data, files[i].size);
    arguments[0] = script;
    for (size_t i = 0; i < options_count; i++)
        arguments[1 + i] = options[i];
    arguments[1 + options_count] = "-o";
    arguments[2 + options_count] = paths[count];
    arguments[3 + options_count] = paths[0];
    if (good && posix_spawn_file_actions_init(&actions) == 0) {
        pid_t child;
        int status = -1;
        posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, paths[count + 1], 01 | 0100 | 01000, 0600);
        if (posix_spawn(&child, script, &actions, NULL, (char *const *)arguments, environ) == 0)
            while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
            }
        posix_spawn_file_actions_destroy(&actions);
        struct bytes said = read_file(paths[count + 1]);
        if (said.data != NULL) {
            free(log->data);
            *log = said;
        }
        if (status == 0)
            result = read_file(paths[count]);
    }
    for (size_t i = 0; i < count + 2; i++) {
        if (paths[i] != NULL)
            unlink(paths[i]);
        free(paths[i]);
    }
    rmdir(folder);
    free(paths);
    free(arguments);
    return result;
}
