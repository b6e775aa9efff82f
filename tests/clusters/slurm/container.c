/* A SPANK plugin with the options of pyxis that Trireme uses, for tests: --container-image, -mounts, -workdir, -writable and
 * --no-container-mount-home. The image is a folder. Each task gets a mount namespace of its own and is put into it by chroot,
 * which is no isolation, but enough to prove that what runs inside sees the image and the mounts and nothing else. */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <slurm/spank.h>

SPANK_PLUGIN(test_container, 1);

enum option { IMAGE, MOUNTS, WORKDIR, WRITABLE, NO_HOME, OPTIONS };
static char *chosen[OPTIONS];
static const char *always[] = {"/proc", "/sys", "/dev", "/etc/hosts", NULL};

static int choose(int option, const char *value, int remote)
{
	(void)remote;
	chosen[option] = strdup(value ? value : "");
	return chosen[option] ? 0 : -1;
}

static struct spank_option table[] = {
	{"container-image", "FOLDER", "[test] run the tasks in this root file system", 1, IMAGE, choose},
	{"container-mounts", "SRC:DST[:ro],...", "[test] bind mounts", 1, MOUNTS, choose},
	{"container-workdir", "PATH", "[test] working directory inside", 1, WORKDIR, choose},
	{"container-writable", NULL, "[test] accepted", 0, WRITABLE, choose},
	{"no-container-mount-home", NULL, "[test] accepted", 0, NO_HOME, choose},
	SPANK_OPTIONS_TABLE_END,
};

int slurm_spank_init(spank_t job, int count, char **arguments)
{
	(void)count, (void)arguments;
	for (struct spank_option *option = table; option->name; option++)
		if (spank_option_register(job, option) != ESPANK_SUCCESS)
			return -1;
	return 0;
}

static int failed(const char *what, const char *path)
{
	slurm_error("test_container: cannot %s %s: %s", what, path, strerror(errno));
	return -1;
}

/* Make the mount point `path` for `source`: all folders above it, and itself a folder or an empty file. */
static void make_place(const char *source, char *path)
{
	struct stat status;
	for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
		*slash = '\0';
		mkdir(path, 0755);
		*slash = '/';
	}
	if (stat(source, &status) == 0 && !S_ISDIR(status.st_mode)) {
		FILE *file = fopen(path, "a");
		if (file)
			fclose(file);
	} else {
		mkdir(path, 0755);
	}
}

static int bind_into(const char *root, const char *source, const char *target, int read_only)
{
	char place[PATH_MAX];
	snprintf(place, sizeof place, "%s%s", root, target);
	make_place(source, place);
	if (mount(source, place, NULL, MS_BIND | MS_REC, NULL))
		return failed("mount", source);
	if (read_only && mount(NULL, place, NULL, MS_BIND | MS_REMOUNT | MS_RDONLY, NULL))
		return failed("protect", source);
	return 0;
}

/* The task's own process, still root, before it becomes the program: a writable copy of the image in memory, then chroot. */
int slurm_spank_task_init_privileged(spank_t job, int count, char **arguments)
{
	static const char *parts[] = {"upper", "work", "root"};
	char base[] = "/tmp/test-container.XXXXXX", root[PATH_MAX], options[2 * PATH_MAX];
	(void)job, (void)count, (void)arguments;
	if (!chosen[IMAGE])
		return 0;
	if (!mkdtemp(base) || unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) || mount("tmpfs", base, "tmpfs", 0, NULL))
		return failed("prepare", base);
	for (int i = 0; i < 3; i++) {
		snprintf(root, sizeof root, "%s/%s", base, parts[i]);
		mkdir(root, 0755);
	}
	snprintf(options, sizeof options, "lowerdir=%s,upperdir=%s/upper,workdir=%s/work", chosen[IMAGE], base, base);
	if (mount("overlay", root, "overlay", 0, options))
		return failed("open image", chosen[IMAGE]);
	for (const char **path = always; *path; path++)
		if (bind_into(root, *path, *path, 0))
			return -1;
	for (char *entry = chosen[MOUNTS] ? strtok(chosen[MOUNTS], ",") : NULL; entry; entry = strtok(NULL, ",")) {
		char *target = strchr(entry, ':');
		if (!target)
			return failed("read mount", entry);
		*target++ = '\0';
		char *flags = strchr(target, ':');
		if (flags)
			*flags++ = '\0';
		if (bind_into(root, entry, target, flags && strcmp(flags, "ro") == 0))
			return -1;
	}
	return chroot(root) || chdir("/") ? failed("enter", chosen[IMAGE]) : 0;
}

int slurm_spank_task_init(spank_t job, int count, char **arguments)
{
	(void)job, (void)count, (void)arguments;
	if (!chosen[IMAGE])
		return 0;
	const char *place = chosen[WORKDIR] ? chosen[WORKDIR] : "/";
	return chdir(place) ? failed("go to", place) : 0;
}

int slurm_spank_exit(spank_t job, int count, char **arguments)
{
	(void)job, (void)count, (void)arguments;
	return system("rmdir /tmp/test-container.* 2>/dev/null") == -1 ? -1 : 0;
}
