/* A SPANK plugin with the options of pyxis that Trireme uses, for tests. Its argument is the folder in which nodes keep containers.
 *
 * The image is a folder. Each task gets a mount namespace of its own and is put into it by chroot, for which it has to be root. That is no
 * isolation, but enough to prove that what runs inside sees the image and the mounts and nothing else. It fails as pyxis and enroot do:
 *   - variables that the image sets in /etc/environment win over the job's, unless --container-env names them;
 *   - what is not mounted is not there, and what is written outside of mounts is gone with the container;
 *   - a mount whose source does not exist ends the step with code 1, after the error lines that pyxis prints;
 *   - when its last task has ended, a step goes on until the container is removed from the node, for as many seconds as the variable
 *     TEST_CONTAINER_REMOVAL_SECONDS says; if that is interrupted, the container's folder stays. */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <slurm/spank.h>

SPANK_PLUGIN(test_container, 1);

enum option { IMAGE, MOUNTS, WORKDIR, WRITABLE, NO_HOME, ENVIRONMENT, OPTIONS };
static char *chosen[OPTIONS];
static const char *always[] = {"/proc", "/sys", "/dev", "/etc/hosts", NULL};
static char root[2 * PATH_MAX]; /* of this task */
static unsigned exited; /* tasks of this step on this node */

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
	{"container-env", "NAME,...", "[test] variables whose values in the job win over the image's", 1, ENVIRONMENT, choose},
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

static void make_folders(char *path)
{
	for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
		*slash = '\0';
		mkdir(path, 0755);
		*slash = '/';
	}
}

/* The folder of this step's container on this node, below the plugin's argument. */
static void container_folder(spank_t job, char **arguments, char *path, size_t size)
{
	char node[HOST_NAME_MAX + 1] = "";
	uint32_t id = 0, step = 0;
	gethostname(node, sizeof node);
	spank_get_item(job, S_JOB_ID, &id);
	spank_get_item(job, S_JOB_STEPID, &step);
	snprintf(path, size, "%s/%s/test_%u.%u", arguments[0], node, id, step);
}

/* Make the mount point `path` for `source`: all folders above it, and itself a folder or an empty file. */
static void make_place(const char *source, char *path)
{
	struct stat status;
	make_folders(path);
	if (stat(source, &status) == 0 && !S_ISDIR(status.st_mode)) {
		FILE *file = fopen(path, "a");
		if (file)
			fclose(file);
	} else {
		mkdir(path, 0755);
	}
}

static int bind_into(const char *source, const char *target, int read_only)
{
	char place[PATH_MAX];
	if (access(source, F_OK)) {
		slurm_error("test_container: --container-mounts: source path does not exist: %s", source);
		return -1;
	}
	snprintf(place, sizeof place, "%s%s", root, target);
	make_place(source, place);
	if (mount(source, place, NULL, MS_BIND | MS_REC, NULL))
		return failed("mount something as", target);
	if (read_only && mount(NULL, place, NULL, MS_BIND | MS_REMOUNT | MS_RDONLY, NULL))
		return failed("protect", source);
	return 0;
}

static int bind_all(void)
{
	for (const char **path = always; *path; path++)
		if (bind_into(*path, *path, 0))
			return -1;
	for (char *entry = chosen[MOUNTS] ? strtok(chosen[MOUNTS], ",") : NULL; entry; entry = strtok(NULL, ",")) {
		char *target = strchr(entry, ':');
		if (!target)
			return failed("read mount", entry);
		*target++ = '\0';
		char *flags = strchr(target, ':');
		if (flags)
			*flags++ = '\0';
		if (bind_into(entry, target, flags && strcmp(flags, "ro") == 0))
			return -1;
	}
	return 0;
}

/* The task's own process, still root, before it becomes the program: a writable copy of the image in memory. */
int slurm_spank_task_init_privileged(spank_t job, int count, char **arguments)
{
	static const char *parts[] = {"upper", "work", "root"};
	char base[PATH_MAX], options[4 * PATH_MAX];
	(void)count;
	if (!chosen[IMAGE])
		return 0;
	container_folder(job, arguments, base, sizeof base);
	make_folders(base);
	mkdir(base, 0755);
	if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) || mount("tmpfs", base, "tmpfs", 0, NULL))
		return failed("prepare", base);
	for (int i = 0; i < 3; i++) {
		snprintf(root, sizeof root, "%s/%s", base, parts[i]);
		mkdir(root, 0755);
	}
	snprintf(options, sizeof options, "lowerdir=%s,upperdir=%s/upper,workdir=%s/work", chosen[IMAGE], base, base);
	if (mount("overlay", root, "overlay", 0, options))
		return failed("open image", chosen[IMAGE]);
	return bind_all();
}

static int is_named(const char *name)
{
	size_t length = strlen(name);
	for (const char *entry = chosen[ENVIRONMENT]; entry; entry = strchr(entry, ',')) {
		entry += *entry == ',';
		if (strncmp(entry, name, length) == 0 && (entry[length] == ',' || entry[length] == '\0'))
			return 1;
	}
	return 0;
}

/* What the image sets in /etc/environment, where enroot puts a Docker image's ENV. Inside the container. */
static void take_environment(spank_t job)
{
	char line[4096];
	FILE *file = fopen("/etc/environment", "r");
	while (file && fgets(line, sizeof line, file)) {
		line[strcspn(line, "\n")] = '\0';
		char *value = strchr(line, '=');
		if (!value)
			continue;
		*value++ = '\0';
		spank_setenv(job, line, value, !is_named(line));
	}
	if (file)
		fclose(file);
}

int slurm_spank_task_init(spank_t job, int count, char **arguments)
{
	(void)count, (void)arguments;
	if (!chosen[IMAGE])
		return 0;
	if (chroot(root) || chdir("/")) /* only now: before this, Slurm goes to the job's folder, and complains where it is not in the image */
		return failed("enter", chosen[IMAGE]);
	take_environment(job);
	const char *place = chosen[WORKDIR] ? chosen[WORKDIR] : "/";
	return chdir(place) ? failed("go to", place) : 0;
}

/* Remove the container after the step's last task on this node, by a process of its own, which Slurm may kill as it may kill enroot's. */
int slurm_spank_task_exit(spank_t job, int count, char **arguments)
{
	char base[PATH_MAX], seconds[32] = "0";
	uint32_t tasks = 0;
	(void)count;
	spank_get_item(job, S_JOB_LOCAL_TASK_COUNT, &tasks);
	if (!chosen[IMAGE] || ++exited < tasks)
		return 0;
	container_folder(job, arguments, base, sizeof base);
	spank_getenv(job, "TEST_CONTAINER_REMOVAL_SECONDS", seconds, sizeof seconds);
	pid_t child = fork();
	if (child == 0) {
		execlp("sh", "sh", "-c", "sleep \"$1\" && rm -rf \"$2\"", "remove", seconds, base, NULL);
		_exit(127);
	}
	waitpid(child, NULL, 0);
	return 0;
}
